"""Scores of pairs of texts: a reranker's own, the cosine of two vectors, or MaxSim of the vectors of tokens.

MaxSim is the sum, over the vectors of a query, of the greatest product with a vector of the document, as in ColBERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from conch.core.errors import Code
from conch.core.inference import ModelSignature
from conch.core.tensors import WireTensor
from conch.wire.openai.reading import ApiError
from conch.wire.retrieval.inputs import TASK, TextOptions, Texts, text_inputs
from conch.wire.retrieval.models import SCORE, VECTOR_COUNT, VECTORS, Kind, vector_output
from conch.wire.retrieval.plans import Array, Results, normalized


def pair_inputs(
    signature: ModelSignature,
    firsts: Sequence[str],
    seconds: Sequence[str | bytes],
    options: TextOptions,
    kind: Kind,
) -> tuple[list[dict[str, WireTensor]], list[int], tuple[str, ...]]:
    """Return the inputs of requests that score pairs, their rows, and the outputs that ``pair_scores`` reads.

    One first text is paired with every second one. ``kind`` is RANKER, DENSE or MULTI_VECTOR; vectors are requested for
    the first texts and then for the second ones. Raises UNSUPPORTED for a model with several scores per pair.
    """
    if kind is Kind.RANKER:
        classes = signature.outputs[SCORE].dims[-1]
        if classes > 1:
            raise ApiError(
                f"model '{signature.name}' has {classes} scores for each pair, but ranking needs one: use "
                f"/v2/models/{signature.name}/infer",
                "model",
                code=Code.UNSUPPORTED,
            )
        repeated = [*firsts] * (len(seconds) // len(firsts))
        texts = [text for text in seconds if isinstance(text, str)]
        if len(texts) < len(seconds):
            raise ApiError(f"model '{signature.name}' scores no images: send texts", code=Code.UNSUPPORTED)
        return *text_inputs(signature, repeated, options, output=SCORE, pairs=texts), (SCORE,)
    if kind is Kind.DENSE:
        output = vector_output(signature)
        return *text_inputs(signature, [*firsts, *seconds], options, output=output), (output,)
    inputs, rows = [], []
    sides: tuple[tuple[str, Texts], ...] = (("query", firsts), ("document", seconds))
    for task, side in sides:
        own = replace(options, task=task, members={TASK: "model"})
        side_inputs, side_rows = text_inputs(signature, side, own, output=VECTORS)
        inputs += side_inputs
        rows += side_rows
    return inputs, rows, (VECTORS, VECTOR_COUNT)


def pair_scores(outputs: Sequence[str], results: Results, pairs: int) -> Array:
    """Return FP32 ``[pairs]`` from the outputs of the requests of ``pair_inputs``."""
    if outputs[0] == SCORE:
        return results.numbers(SCORE)[:, 0]
    if outputs[0] != VECTORS:
        vectors = normalized(results.numbers(outputs[0]))
        return cosines(vectors[:-pairs], vectors[-pairs:])
    rows = multi_vectors(results)
    queries, documents = rows[:-pairs], rows[-pairs:]
    queries = queries * (pairs // len(queries))
    return np.array([max_sim(query, document) for query, document in zip(queries, documents, strict=True)], np.float32)


def cosines(firsts: Array, seconds: Array) -> Array:
    """Return the products of FP32 vectors ``[1 or n, size]`` and ``[n, size]`` of length 1, row by row."""
    return np.asarray((firsts.astype(np.float64) * seconds).sum(1), np.float32)


def max_sim(query: Array, document: Array) -> float:
    """Return the MaxSim of FP32 ``[vectors, size]`` of a query and of a document; 0 if one of them has no vector."""
    return float((query @ document.T).max(1).sum()) if len(query) and len(document) else 0.0


def multi_vectors(results: Results, vectors: str = VECTORS, counted_by: str = VECTOR_COUNT) -> list[Array]:
    """Return the vectors of each text, FP32 ``[vectors, size]`` without padding, from the outputs with these names."""
    size = results.last_dimension(vectors)
    rows = zip(results.ragged(vectors), results.numbers(counted_by)[:, 0], strict=True)
    return [row.reshape(-1, size)[: int(count)] for row, count in rows]
