"""The engine that a GGUF file gets, which must compute the weights that the file holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.backends.generation.engines import choose_engine
from conch.checkpoints.gguf.reader import GgufFile, TensorInfo
from conch.checkpoints.options import Options


@pytest.mark.parametrize(("kind", "engine"), [(3, "openvino"), (8, "openvino"), (12, "transformers")])
def test_file_whose_weights_openvino_rounds_is_served_by_transformers(kind: int, engine: str) -> None:
    tensor = TensorInfo("blk.0.ffn_up.weight", (1, 256), kind, 0, 0)
    file = GgufFile(Path("m.gguf"), 3, {}, {tensor.name: tensor})
    checkpoint: Any = SimpleNamespace(options=Options(), variant=None, gguf=file)
    assert choose_engine(checkpoint, on_gpu=False) == engine
