"""Sparse models answer as sentence-transformers' SparseEncoder does over the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding, SpladePooling
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer

from conch.backends.tasks import vocabulary
from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from tests.retrieval_models import NEIGHBOURS, SIZE, backbone, close, each, embed, saved, sparse
from tests.task_requests import open_model
from tests.text_checkpoints import write


def check(folder: Path) -> None:
    reference, task = SparseEncoder(str(folder), device="cpu"), open_model(folder)
    for encode, inputs in (
        (reference.encode, {}),
        (reference.encode_query, {"task": "query"}),
        (reference.encode_document, {"task": "document"}),
    ):
        expected = np.stack([encode(text).to_dense().numpy() for text in NEIGHBOURS])
        size = expected.shape[1]
        close(sparse(each(task, NEIGHBOURS, **inputs), size), expected)
        close(sparse(embed(task, NEIGHBOURS, **inputs), size), expected)
        close(sparse(embed(task, NEIGHBOURS[:1], **inputs), size), expected[:1])


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_splade(tmp_path: Path, strategy: str, activation: str) -> None:
    first = backbone(tmp_path / "backbone", "AutoModelForMaskedLM", "fill-mask")
    folder = saved(
        tmp_path / "folder", first, SpladePooling(strategy, activation), kind=SparseEncoder, max_active_dims=9
    )
    check(folder)
    names = [(output.name, output.datatype, output.dims) for output in describe_task(Checkpoint.open(folder)).outputs]
    assert names == [
        ("sparse_indices", "INT64", (-1,)),
        ("sparse_values", "FP32", (-1,)),
        ("num_input_tokens", "UINT32", (1,)),
    ]


def test_splade_of_older_versions(tmp_path: Path) -> None:
    first = backbone(tmp_path / "backbone", "AutoModelForMaskedLM", "fill-mask")
    folder = saved(tmp_path / "folder", first, SpladePooling("max"), kind=SparseEncoder)
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    listed[1]["type"] = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30, "do_lower_case": False}))
    check(folder)


def test_queries_without_a_network(tmp_path: Path) -> None:
    documents = backbone(tmp_path / "backbone", "AutoModelForMaskedLM", "fill-mask")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "backbone"))
    queries = SparseStaticEmbedding(tokenizer, torch.rand(len(tokenizer.get_vocab())))
    router = Router.for_query_document([queries], [documents, SpladePooling("max")])
    check(saved(tmp_path / "folder", router, kind=SparseEncoder))


def test_sparse_auto_encoder(tmp_path: Path) -> None:
    coder = SparseAutoEncoder(SIZE, 4 * SIZE, k=7, normalize=True)
    for parameter in (coder.pre_bias, coder.latent_bias):
        nn.init.normal_(parameter, std=0.1)
    first = backbone(tmp_path / "backbone")
    check(saved(tmp_path / "folder", first, Pooling(SIZE, "mean"), coder, kind=SparseEncoder))


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_logits_of_all_positions_are_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, family: str
) -> None:
    write(tmp_path, "AutoModelForMaskedLM", family=family)
    network = AutoModelForMaskedLM.from_pretrained(str(tmp_path)).eval()
    ids = torch.arange(30).reshape(2, 15) % 60 + 4
    tensors = {"input_ids": ids, "attention_mask": (torch.arange(15) < torch.tensor([[15], [9]])).long()}
    with torch.inference_mode():
        logits = torch.log1p(torch.relu(network(**tensors).logits)) * tensors["attention_mask"][..., None]
    expected = logits.amax(1) if strategy == "max" else logits.sum(1)
    lengths: list[int] = []
    projection = network.get_output_embeddings()
    linear = projection.forward

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        lengths.append(hidden.shape[1])
        return linear(hidden)

    projection.forward = counted
    pooling = vocabulary.VocabularyPooling(network, strategy, twice=False)
    lengths.clear()
    monkeypatch.setattr(vocabulary, "PART", 4 * 2 * logits.shape[2])
    with torch.inference_mode():
        close(pooling(tensors).numpy(), expected.numpy())
    assert lengths == [4, 4, 4, 3]
