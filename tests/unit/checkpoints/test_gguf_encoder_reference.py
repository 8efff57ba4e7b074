"""The reference for embeddings and scores of GGUF files gives those of transformers for the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.gguf_encoder_reference import class_outputs, token_vectors
from conch.core.errors import ConchError
from tests.unit.checkpoints import gguf_models
from tests.unit.checkpoints.gguf_encoders import PIECES, SIZES, dequantised, wordpieces, write_encoder, write_model
from tests.unit.checkpoints.gguf_files import RANK

IDS = [5, 9, 2, 30, 30, 8]


def vectors(path: Path, **limits: float) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return token_vectors(read_gguf(path), pool, IDS, **limits)


@pytest.mark.parametrize(
    ("family", "kind"), [("Bert", "F32"), ("Bert", "Q8_0"), ("NomicBert", "Q8_0"), ("JinaEmbeddingsV3", "F32")]
)
def test_encoder_has_the_vectors_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    network = write_model(tmp_path / "m.gguf", family, kind)
    with torch.inference_mode():
        expected = network(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), expected, atol=2e-5)


def outputs(path: Path, hidden: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return class_outputs(read_gguf(path), pool, hidden)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_classifier_of_an_encoder_has_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(4)
    config = transformers.XLMRobertaConfig(**SIZES, num_labels=2)
    network = transformers.XLMRobertaForSequenceClassification(config).eval()
    path = write_encoder(tmp_path / "m.gguf", network, wordpieces(PIECES), RANK, kind)
    dequantised(path, network)
    with torch.inference_mode():
        expected = network(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(outputs(path, vectors(path)), expected, atol=1e-4)


def write_answering(path: Path, **tensors: Any) -> Any:
    """Write a small decoder that answers yes or no; returns it."""
    network = gguf_models.model("qwen3")
    metadata = {"qwen3.pooling_type": RANK, "qwen3.classifier.output_labels": ["yes", "no"]}
    gguf_models.write(path, "qwen3", network, metadata=metadata, tensors=tensors)
    return network


def test_classifier_of_a_decoder_has_the_probabilities_of_its_last_token(tmp_path: Path) -> None:
    rows = np.random.default_rng(6).normal(0, 0.3, (2, 32)).astype(np.float32)
    network = write_answering(tmp_path / "m.gguf", **{"cls.output.weight": rows})
    with torch.inference_mode():
        last = network.model(torch.tensor([IDS])).last_hidden_state[0, -1]
    expected = (torch.tensor(rows) @ last).log_softmax(0).numpy()
    np.testing.assert_allclose(outputs(tmp_path / "m.gguf", vectors(tmp_path / "m.gguf")), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"cls.weight": (32, 32)}, "no reference for a classifier without 'cls.output.weight'"),
        ({"cls.output.weight": (2, 32), "cls.norm.weight": (32,)}, "does not use tensor 'cls.norm.weight'"),
    ],
)
def test_other_classifiers_are_not_computed(tmp_path: Path, tensors: dict[str, tuple[int, ...]], reason: str) -> None:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_answering(tmp_path / "m.gguf", **zeros)
    with pytest.raises(ConchError, match=reason):
        outputs(tmp_path / "m.gguf", np.zeros((3, 32), np.float32))


@pytest.mark.parametrize("causal", [True, False])
def test_decoder_has_the_vectors_of_transformers(tmp_path: Path, causal: bool) -> None:
    network = gguf_models.model("qwen3")
    gguf_models.write(tmp_path / "m.gguf", "qwen3", network, metadata={"qwen3.attention.causal": causal})
    every = torch.zeros(1, 1, len(IDS), len(IDS))
    with torch.inference_mode():
        expected = network.model(torch.tensor([IDS]), attention_mask=None if causal else every).last_hidden_state[0]
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eurobert", {}),
        ("gemma_embedding", {}),
        ("modernbert", {}),
        ("modernbert", {"hidden_activation": "silu"}),
    ],
)
def test_model_that_only_embeds_has_the_vectors_of_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    network = gguf_models.model(name, **settings)
    metadata = {f"modern-bert.{key}": value for key, value in settings.items()}
    gguf_models.write(tmp_path / "m.gguf", name, network, metadata=metadata)
    with torch.inference_mode():
        expected = network(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), expected, atol=1e-4 * np.abs(expected).max())


def test_projections_follow_the_last_layer(tmp_path: Path) -> None:
    chance = np.random.default_rng(6)
    first, second = (chance.normal(0, 0.3, shape).astype(np.float32) for shape in ((48, 32), (32, 48)))
    network = gguf_models.model("gemma_embedding")
    tensors = {"dense_2.weight": first, "dense_3.weight": second}
    gguf_models.write(tmp_path / "m.gguf", "gemma_embedding", network, tensors=tensors)
    with torch.inference_mode():
        hidden = network(torch.tensor([IDS])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(vectors(tmp_path / "m.gguf"), hidden @ first.T @ second.T, rtol=1e-2, atol=2e-2)


def test_file_that_takes_too_long_or_has_another_network_is_not_computed(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "Bert")
    with pytest.raises(ConchError, match="s of processor time"):
        vectors(tmp_path / "m.gguf", limit=-1.0)
    for key, value, reason in (
        ("attention.sliding_window", 11, "longer than the sliding window of 5 tokens"),
        ("attention.sliding_window_pattern", 0, "sliding_window_pattern is 0"),
    ):
        metadata = {f"modern-bert.{key}": value}
        gguf_models.write(tmp_path / "b.gguf", "modernbert", gguf_models.model("modernbert"), metadata=metadata)
        with pytest.raises(ConchError, match=reason):
            vectors(tmp_path / "b.gguf")
    with pytest.raises(ConchError, match="no reference for the classifier of architecture 'modern-bert'"):
        outputs(tmp_path / "b.gguf", np.zeros((3, 32), np.float32))
    partial = "scaled or partial rotary positions"
    for key, value, reason in (
        ("rope.scaling.factor", 2.0, partial),
        ("rope.dimension_count", 4, partial),
        ("attention.head_count", 0, "head_count is 0"),
        ("attention.head_count", 5, "head_count is 5"),
    ):
        write_model(tmp_path / "n.gguf", "NomicBert", metadata={f"nomic-bert.{key}": value})
        with pytest.raises(ConchError, match=reason):
            vectors(tmp_path / "n.gguf")
