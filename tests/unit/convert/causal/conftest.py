"""What several tests of language models convert."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from transformers import LlamaConfig

    from tests.convert_checkpoints import causal

    return causal(tmp_path_factory.mktemp("llama"), LlamaConfig, num_key_value_heads=2)
