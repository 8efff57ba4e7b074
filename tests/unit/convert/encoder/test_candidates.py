"""The order in which passages are ranked for queries, compared with the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import Array
from conch.convert.encoder.agreement import SampleOutputs
from conch.convert.encoder.contrasts import compare_order, contrasts, scores
from conch.convert.sentences import SearchTexts

RANDOM = np.random.default_rng(3)
MANY = SearchTexts(tuple(f"q{n}" for n in range(12)), tuple(f"p{n}" for n in range(200)))
FEW = SearchTexts(("a bus",), ("a tram", "a cake"))


def outputs(name: str, *values: Any) -> list[SampleOutputs]:
    return [{name: np.array(value, np.float32)} for value in values]


def dense(vectors: Array) -> list[SampleOutputs]:
    return outputs("embedding", *vectors[:, None])


def test_order_survives_scaling_and_suffers_from_noise() -> None:
    vectors = RANDOM.standard_normal((212, 16))
    same = compare_order(MANY, "cosine", dense(vectors), dense(vectors * 3))
    assert [(figure.name, figure.value) for figure in same] == [("nDCG@10", 1), ("recall@100", 1)]
    noisy = compare_order(MANY, "cosine", dense(vectors), dense(vectors + RANDOM.standard_normal((212, 16))))
    for figure in noisy:
        assert figure.value < 0.9
        assert figure.low <= figure.delta <= figure.high


def test_the_worst_kind_of_vectors_counts() -> None:
    vectors = RANDOM.standard_normal((212, 1, 16))
    reference = [{"embedding": row, "sparse_embedding": row} for row in vectors]
    variant = [{"embedding": row, "sparse_embedding": other} for row, other in zip(vectors, vectors[::-1], strict=True)]
    first, _ = compare_order(MANY, "cosine", reference, variant)
    assert first.name == "nDCG@10 of sparse_embedding"
    assert first.value < 0.5


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [("dot", [2, 9]), ("cosine", [1, 0.9]), ("euclidean", [-1, -np.sqrt(68)]), ("manhattan", [-1, -10])],
)
def test_vectors_are_compared_by_the_models_function(similarity: str, expected: list[float]) -> None:
    vectors = np.array([[1.0, 0], [2, 0], [9, np.sqrt(19)]])
    if similarity == "euclidean" or similarity == "manhattan":
        vectors[2, 1] = 2
    np.testing.assert_allclose(scores("embedding", FEW, similarity, dense(vectors)), [expected], rtol=1e-6)


def test_vectors_of_tokens_are_compared_by_late_interaction() -> None:
    vectors = outputs("token_embeddings", [[1, 0], [0, 1]], [[0.5, 0], [0, 0.25], [0, 0.5]], np.zeros((0, 2)))
    assert scores("token_embeddings", FEW, "maxsim", vectors).tolist() == [[1, 0]]


def test_a_query_is_not_its_own_passage() -> None:
    texts = SearchTexts(("a bus",), ("a bus", "a cake"))
    assert scores("embedding", texts, "dot", dense(np.eye(3))).tolist() == [[-np.inf, 0]]


def test_texts_are_reported_by_the_nearest_one() -> None:
    before = outputs("embedding", [[1, 0]], [[0.9, 0.1]], [[0, 1]])
    after = outputs("embedding", [[0, 1]], [[0.9, 0.1]], [[0, 1]])
    found = contrasts(FEW, "cosine", before, after)
    (worst,) = found.worst
    assert (worst.text, worst.cosine, worst.difference) == ("a bus", 0, 1)
    assert worst.reference == "nearest (0.994): a tram"
    assert worst.variant == "nearest (1.000): a cake"
    assert found.differences == pytest.approx((0, 0, 1), abs=1e-6)


def test_a_vector_that_is_no_number_differs_most() -> None:
    before = outputs("embedding", [[1, 0]], [[0, 1]], [[1, 1]])
    found = contrasts(FEW, "cosine", before, outputs("embedding", [[1, 0]], [[1, 0]], [[float("nan"), 1]]))
    assert [(worst.text, worst.cosine) for worst in found.worst] == [("a cake", None), ("a tram", 0)]
