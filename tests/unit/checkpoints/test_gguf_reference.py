"""The reference computes what transformers computes with the same weights, and refuses what it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.gguf_consistency import require_consistent
from conch.checkpoints.gguf_reference import GgufReference
from conch.core.errors import Code, ConchError
from tests.unit.checkpoints.gguf_models import MODELS, model, write

SEQUENCES = [([3, 4, 5, 6, 7, 8, 9], 4), ([80, 11, 12, 13], 2)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def expected(network: Any) -> list[Any]:
    results = []
    for ids, count in SEQUENCES:
        with torch.inference_mode():
            logits = network(torch.tensor([ids[:-1]])).logits[0, -count:]
        results.append(torch.log_softmax(logits.double(), -1).numpy())
    return results


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    network = model(name)
    file = read_gguf(write(tmp_path / "m.gguf", name, network))
    require_consistent(file)
    scores = GgufReference(file, pool).score(SEQUENCES)
    for (ids, count), rows, sequence in zip(SEQUENCES, expected(network), scores, strict=True):
        assert [score.token for score in sequence] == ids[-count:]
        assert [score.best for score in sequence] == rows.argmax(-1).tolist()
        np.testing.assert_allclose(
            [score.logprob for score in sequence], rows[np.arange(count), ids[-count:]], atol=2e-5
        )
        np.testing.assert_allclose([score.best_logprob for score in sequence], rows.max(-1), atol=2e-5)


def refused(path: Path, pool: ThreadPoolExecutor, limit: float = 60.0) -> str:
    with pytest.raises(ConchError) as error:
        GgufReference(read_gguf(path), pool).score(SEQUENCES, limit)
    assert error.value.code is Code.INVALID_ARG
    return error.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "there is no reference for architecture 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, "no reference for a scaling of rotary frequencies of type 'yarn'"),
        ({"llama.attention.head_count": 8}, "tensor 'blk.0.attn_q.weight' has shape (32, 32) instead of (64, 32)"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        (
            {"llama.attention.key_length": 1, "llama.attention.value_length": 1},
            "there is no reference for 0 rotary positions in 1 numbers",
        ),
        ({"llama.attention.head_count_kv": 3}, "no reference for values whose size differs from that of the keys"),
        ({"llama.rope.dimension_count": 2**31}, "there is no reference for 2147483648 rotary positions in 8 numbers"),
        ({"llama.block_count": 9}, "has no tensor 'blk.4.attn_q.weight'"),
        ({"llama.block_count": 3}, "the reference does not use tensor 'blk.3."),
        ({"llama.attention.sliding_window": 5}, "a text longer than the sliding window of 5 tokens"),
        ({"llama.embedding_length": 33}, "has shape (96, 32) instead of (more than 80, 33)"),
    ],
)  # fmt: skip
def test_model_that_the_reference_does_not_know_is_refused(
    tmp_path: Path, pool: ThreadPoolExecutor, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "m.gguf", "llama", model("llama"), metadata=change)
    assert message in refused(path, pool)


def test_a_tensor_that_the_reference_does_not_use_is_named(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = write(tmp_path / "m.gguf", "llama", model("llama"), tensors={"blk.1.attn_sinks.weight": np.ones(4, "f4")})
    assert refused(path, pool) == "the reference does not use tensor 'blk.1.attn_sinks.weight'"


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    reference = GgufReference(read_gguf(write(tmp_path / "m.gguf", "llama", model("llama"))), pool)
    with pytest.raises(ConchError, match="it has no token 96"):
        reference.score([([3, 96], 1)])


def test_a_computation_that_takes_too_long_ends_after_the_first_layer(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = write(tmp_path / "m.gguf", "llama", model("llama"))
    assert refused(path, pool, limit=0.0) == "it would take about 0 s of processor time"


def test_rotary_frequencies_are_divided_as_the_file_tells(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    network = model("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    for change in (
        {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
        {"tensors": {"rope_freqs.weight": np.full(4, 4, "f4")}},
    ):
        path = write(tmp_path / "m.gguf", "llama", network, **change)
        scores = GgufReference(read_gguf(path), pool).score(SEQUENCES)
        for rows, sequence in zip(expected(network), scores, strict=True):
            np.testing.assert_allclose([score.best_logprob for score in sequence], rows.max(-1), atol=2e-5)
