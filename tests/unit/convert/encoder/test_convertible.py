"""Embedding models that ``conch convert`` exports, and those that it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import Module
from conch.checkpoints.options import Options
from conch.convert.encoder.conversion import convertible
from conch.convert.encoder.network import head_of
from conch.core.errors import ConchError
from tests.text_checkpoints import write

NAMESPACE = "sentence_transformers.models."


def folder(path: Path, *kinds: str, **settings: Any) -> Checkpoint:
    """A checkpoint with modules of ``kinds``, whose configurations are empty."""
    write(path, "AutoModel")
    listed = [
        {"path": f"{index}_{kind}" if index else "", "type": NAMESPACE + kind} for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    for module in listed[1:]:
        (path / module["path"]).mkdir()
        (path / module["path"] / "config.json").write_text("{}")
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return Checkpoint.open(path)


def test_a_dense_model_with_one_network_is_converted(tmp_path: Path) -> None:
    model = convertible(folder(tmp_path, "Transformer", "Pooling", "Normalize"))
    assert [module.kind for module in model.modules] == ["Transformer", "Pooling", "Normalize"]
    assert isinstance(model.modules[0], Module)


@pytest.mark.parametrize(
    ("kinds", "settings", "reason"),
    [
        (("MLMTransformer", "SpladePooling"), {"model_type": "SparseEncoder"}, "it is a SparseEncoder"),
        (("Transformer", "MultiVectorMask"), {"model_type": "MultiVectorEncoder"}, "it is a MultiVectorEncoder"),
        (("StaticEmbedding", "Normalize"), {}, "its module 'StaticEmbedding' has no network to export"),
        (("Transformer", "WeightedLayerPooling", "Pooling"), {}, "its modules read other outputs of the network"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, kinds: tuple[str, ...], settings: Any, reason: str) -> None:
    checkpoint = folder(tmp_path, *kinds, **settings)
    with pytest.raises(ConchError, match=f"is not converted, as {reason}"):
        convertible(checkpoint)


def test_a_reranker_over_a_language_model_is_not_converted() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    checkpoint = Checkpoint(Path("m"), "m", "", config, Options(), task="text-ranking")
    with pytest.raises(ConchError, match="'m' ranks with a causal language model, which is not converted"):
        head_of(checkpoint)
