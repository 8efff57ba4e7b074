"""Multi-vector models answer as sentence-transformers' MultiVectorEncoder does over the same folder."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from torch import nn

from tests.retrieval_models import NEIGHBOURS, backbone, close, dense, each, embed, saved, token_vectors
from tests.task_requests import open_model


def check(folder: Path) -> None:
    reference, task = MultiVectorEncoder(str(folder), device="cpu"), open_model(folder)
    for encode, inputs in (
        (reference.encode_query, {"task": "query"}),
        (reference.encode_document, {"task": "document"}),
        (reference.encode, {}),
    ):
        expected = [encode(text).numpy() for text in NEIGHBOURS]
        for results in (each(task, NEIGHBOURS, **inputs), embed(task, NEIGHBOURS, **inputs)):
            for found, wanted in zip(token_vectors(results), expected, strict=True):
                assert found.shape == wanted.shape
                close(found, wanted)


def projection() -> Any:
    return dense(nn.Identity(), 8, bias=False, module_input_name="token_embeddings")


@pytest.mark.parametrize(
    "expansion",
    [
        {"strategy": "fixed", "length": 12},
        {"strategy": "fixed", "length": 16, "attend": True},
        {"strategy": "min", "length": 9, "token": "[SEP]"},
        None,
    ],
)
def test_query_expansion_and_skiplist(tmp_path: Path, expansion: dict[str, Any] | None) -> None:
    first = backbone(tmp_path / "backbone")
    first.query_expansion, first.query_length, first.document_length = expansion, 17, 20
    mask = MultiVectorMask(skiplist_words=[",", "?", "unknown"])
    tokens = Normalize(module_input_name="token_embeddings")
    prompts = {"query": "the ", "document": "a "}
    check(saved(tmp_path / "folder", first, projection(), mask, tokens, kind=MultiVectorEncoder, prompts=prompts))


def test_pylate(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", backbone(tmp_path / "backbone"), projection(), kind=MultiVectorEncoder)
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["type"] = "sentence_transformers.models.Transformer"
    listed[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": False}))
    config: dict[str, Any] = {"in_features": 32, "out_features": 8, "bias": False, "use_residual": False}
    config["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(config))
    settings = {
        "model_type": "ColBERT", "query_prefix": "[MASK] ", "document_prefix": "[UNK] ", "query_length": 14,
        "document_length": 22, "do_query_expansion": True, "attend_to_expansion_tokens": False,
        "skiplist_words": list(string.punctuation),
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    check(folder)


def test_stanford(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    backbone(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "linear.weight": torch.randn(8, 32)}, folder / "model.safetensors", {"format": "pt"})
    metadata = {"query_token_id": "[MASK]", "doc_token_id": "[UNK]", "query_maxlen": 13, "doc_maxlen": 25, "dim": 8}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    check(folder)


@pytest.mark.parametrize(
    "settings", [{"pool_factor": 2.0}, {"pool_factor": 1.5, "num_protected_tokens": 0, "tasks": ["query", "document"]}]
)
def test_similar_vectors_are_replaced_by_their_means(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokens = Normalize(module_input_name="token_embeddings")
    modules = projection(), MultiVectorMask(skiplist_words=[","]), tokens, HierarchicalTokenPooling(**settings)
    check(saved(tmp_path / "folder", backbone(tmp_path / "backbone"), *modules, kind=MultiVectorEncoder))
