"""Embedding models that ``conch convert`` exports, and those that it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import Module
from conch.checkpoints.options import Options
from conch.convert.encoder.retrieval import EmbeddingConversion, convertible
from conch.core.errors import ConchError
from tests.convert_checkpoints import no_progress, quick_plan
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
    model = convertible(folder(tmp_path, "Transformer", "Pooling", "Normalize"), whole=True)
    assert [module.kind for module in model.modules] == ["Transformer", "Pooling", "Normalize"]
    assert isinstance(model.modules[0], Module)


def test_a_model_without_a_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConchError, match="cannot be converted, because its module 'StaticEmbedding' has no network to export"
    ):
        convertible(folder(tmp_path, "StaticEmbedding", "Normalize"), whole=True)


def test_a_model_of_document_pages_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "Transformer")
    (tmp_path / "modules.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["ColPaliForRetrieval"]}))
    checkpoint = Checkpoint.open(tmp_path, Options(task="feature-extraction"))
    with pytest.raises(
        ConchError, match="cannot be converted, because its network reads pages of documents as texts with"
    ):
        convertible(checkpoint, whole=True)


def test_a_model_whose_tasks_pool_logits_differently_is_refused(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, "MLMTransformer", "Router", model_type="SparseEncoder")
    routes = {task: [f"{task}_0_SpladePooling"] for task in ("query", "document")}
    types = {name: NAMESPACE + "SpladePooling" for names in routes.values() for name in names}
    router = tmp_path / "1_Router"
    (router / "router_config.json").write_text(json.dumps({"types": types, "structure": routes}))
    for strategy, name in zip(("sum", "max"), types, strict=True):
        (router / name).mkdir()
        (router / name / "config.json").write_text(json.dumps({"pooling_strategy": strategy}))
    with pytest.raises(
        ConchError, match="cannot be converted, because its tasks pool the same logits of words in different"
    ):
        convertible(checkpoint, whole=True)


@pytest.mark.parametrize(
    ("kinds", "settings", "has"),
    [
        (("CLIPModel",), {}, "images, which need the image processor of transformers"),
        (("Transformer", "SpladePooling"), {"model_type": "SparseEncoder"}, "sparse vectors"),
    ],
)
def test_what_nvidias_server_cannot_compute_is_refused_with_the_layout_that_serves_it(
    kinds: tuple[str, ...], settings: dict[str, str], has: str, tmp_path: Path
) -> None:
    plan = quick_plan(tmp_path, tmp_path / "models", layout="triton")
    with pytest.raises(ConchError, match=f"has {has}: leave the option out, and serve the converted model with conch"):
        EmbeddingConversion(plan, folder(tmp_path, *kinds, **settings), tmp_path / "built", no_progress)
