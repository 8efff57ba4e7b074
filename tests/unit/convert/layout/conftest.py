"""The checkpoint that layouts are written from."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from tests.text_checkpoints import wordpiece


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "checkpoint"
    wordpiece(folder)
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "model.onnx", "conch.json", "code.py"):
        (folder / name).write_text("{}")
    (folder / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return Checkpoint(folder, "tiny", "", {"hidden_size": 3}, Options(), task="feature-extraction", max_length=8)
