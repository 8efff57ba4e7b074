"""Compares the order in which an embedding model ranks passages for queries with the reference's order.

Does no I/O: takes arrays, returns figures. Outputs are those of queries, followed by those of passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.manifest import Contrast, Contrasts
from conch.convert.conversion import kept, shortened
from conch.convert.encoder.agreement import SampleOutputs, TaskAgreement, mean_agreement
from conch.convert.encoder.contrasts import smallest_cosine
from conch.convert.evidence import ndcg, recall
from conch.convert.sentences import SearchTexts

#: The names of a text's outputs: one vector, one sparse vector with an element for each word, a vector per token.
DENSE_VECTOR, SPARSE_VECTOR, TOKEN_VECTORS = "embedding", "sparse_embedding", "token_embeddings"
#: The numbers of the best passages that are compared; at most three of five passages.
FIRST, MOST = 10, 100


def compare_order(
    texts: SearchTexts, similarity: str, reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> tuple[TaskAgreement, TaskAgreement]:
    """Return nDCG@10, whose gains are the reference's ranks, and recall@100 of the reference's best passages.

    For a model with several kinds of vectors, they are those of the kind with the lowest nDCG@10.
    """
    pairs = [_compare_order(name, texts, similarity, reference, variant) for name in reference[0]]
    return min(pairs, key=lambda pair: pair[0].value)


def _compare_order(
    name: str,
    texts: SearchTexts,
    similarity: str,
    reference: Sequence[SampleOutputs],
    variant: Sequence[SampleOutputs],
) -> tuple[TaskAgreement, TaskAgreement]:
    expected, actual = (scores(name, texts, similarity, outputs) for outputs in (reference, variant))
    rows = list(zip(expected, actual, strict=True))
    most = min(MOST, max(1, len(texts.passages) * 3 // 5))
    of = f" of {name}" if len(reference[0]) > 1 else ""
    return (
        mean_agreement(f"nDCG@{FIRST}{of}", [ndcg(a, b, FIRST) for a, b in rows]),
        mean_agreement(f"recall@{most}{of}", [recall(a, b, most) for a, b in rows]),
    )


def scores(name: str, texts: SearchTexts, similarity: str, outputs: Sequence[SampleOutputs]) -> Array:
    """Return ``[queries, passages]``; a passage that is the query itself has the lowest score."""
    count = len(texts.queries)
    queries, passages = ([output[name] for output in part] for part in (outputs[:count], outputs[count:]))
    if name == TOKEN_VECTORS:
        matrix = _late_interaction(queries, passages)
    else:
        function = similarity if name == DENSE_VECTOR or similarity == "cosine" else "dot"
        matrix = _similarities(function, np.concatenate(queries), np.concatenate(passages))
    same = np.array([[query == passage for passage in texts.passages] for query in texts.queries])
    return np.where(same, -np.inf, np.nan_to_num(matrix, nan=-np.inf))


def _similarities(function: str, queries: Array, passages: Array) -> Array:
    queries, passages = (vectors.astype(np.float64) for vectors in (queries, passages))
    if function == "euclidean":
        return np.stack([-np.linalg.norm(passages - query, axis=1) for query in queries])
    if function == "manhattan":
        return np.stack([-np.abs(passages - query).sum(1) for query in queries])
    if function != "dot":
        queries, passages = (
            vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            for vectors in (queries, passages)
        )
    return np.asarray(queries @ passages.T)


def _late_interaction(queries: Sequence[Array], passages: Sequence[Array]) -> Array:
    """Return the sum over a query's vectors of the largest product with a vector of the passage."""
    filled = [vectors if len(vectors) else np.zeros((1, vectors.shape[1]), np.float32) for vectors in passages]
    starts = np.cumsum([0, *map(len, filled[:-1])])
    joined = np.concatenate(filled).T
    return np.stack([np.maximum.reduceat(query @ joined, starts, axis=1).sum(0) for query in queries])


#: The number of characters of a passage in a description.
_PASSAGE: Final = 80


def contrasts(
    texts: SearchTexts, similarity: str, reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> Contrasts:
    """Return the texts whose vectors differ most: queries with their best passage, and the reverse."""
    cosines = [smallest_cosine(a, b) for a, b in zip(reference, variant, strict=True)]
    differences = [
        0.0 if cosine is None and _finite(output) else float("inf") if cosine is None else max(0.0, 1 - cosine)
        for cosine, output in zip(cosines, variant, strict=True)
    ]
    name = next(iter(reference[0]))
    before, after = (scores(name, texts, similarity, outputs) for outputs in (reference, variant))
    everything = [*texts.queries, *texts.passages]

    def best(matrix: Array, index: int) -> str:
        count = len(texts.queries)
        row, others = (matrix[index], texts.passages) if index < count else (matrix[:, index - count], texts.queries)
        nearest = int(row.argmax())
        return f"nearest ({row[nearest]:.3f}): {shortened(others[nearest], _PASSAGE)}"

    def describe(index: int) -> Contrast:
        cosine = cosines[index]
        return Contrast(
            shortened(everything[index]),
            best(before, index),
            best(after, index),
            float(f"{differences[index]:.4g}"),
            None if cosine is None else round(cosine, 6),
        )

    return kept("1 − cosine of the two embeddings", np.array(differences), differences, describe)


def _finite(output: SampleOutputs) -> bool:
    return all(np.isfinite(values).all() for values in output.values())
