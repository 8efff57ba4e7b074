"""The outputs of embedding models: how features of a batch become a value per text, and values become tensors.

Dense: ``embedding`` FP32 ``[dimension]``. Sparse: ``sparse_indices`` INT64 ``[-1]``, ascending and padded with -1, and
``sparse_values`` FP32 ``[-1]``, padded with 0. Multi-vector: ``token_embeddings`` FP32 ``[-1, dimension]``, padded with
zeros, and ``num_vectors`` UINT32 ``[1]``. Texts of one request are padded to the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.encoders.encoder_task import stacked
from conch.checkpoints.modules import DENSE, MULTI_VECTOR, SENTENCE, SPARSE, TOKENS, EmbeddingModel
from conch.checkpoints.steps import MASK, Features, finish, largest
from conch.core.inference import TensorSpec

COUNT: Final = TensorSpec("num_input_tokens", "UINT32", (1,))


def output_specs(model: EmbeddingModel) -> tuple[TensorSpec, ...]:
    """Return the outputs of a model, without the batch dimension."""
    if model.family == DENSE:
        return TensorSpec("embedding", "FP32", (model.dimension,)), COUNT
    if model.family == SPARSE:
        return TensorSpec("sparse_indices", "INT64", (-1,)), TensorSpec("sparse_values", "FP32", (-1,)), COUNT
    return TensorSpec(TOKENS, "FP32", (-1, model.dimension)), TensorSpec("num_vectors", "UINT32", (1,)), COUNT


def values_of(model: EmbeddingModel, features: Features) -> Iterable[Any]:
    """Return the value of each text: a vector, indices with values, or a vector per token."""
    if model.family == MULTI_VECTOR:
        rows = zip(features.arrays[TOKENS], features.arrays[MASK], strict=True)
        return [vectors[real > 0] for vectors, real in rows]
    vectors = features.arrays[SENTENCE]
    if model.family == DENSE:
        return finish(model, vectors)
    if model.active_dims:
        vectors = largest(vectors, model.active_dims)
    return [(indices := np.flatnonzero(row), row[indices]) for row in vectors]


def tensors_of(model: EmbeddingModel, values: Sequence[Any]) -> dict[str, Array]:
    """Return the outputs for the values of a request's texts."""
    if model.family == DENSE:
        return {"embedding": stacked(values)}
    if model.family == SPARSE:
        width = max([1, *(len(indices) for indices, _ in values)])
        shape = len(values), width
        positions, weights = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        for row, (indices, own) in enumerate(values):
            positions[row, : len(indices)] = indices
            weights[row, : len(indices)] = own
        return {"sparse_indices": positions, "sparse_values": weights}
    counts = np.array([[len(vectors)] for vectors in values], np.uint32)
    if len(values) == 1:
        return {TOKENS: values[0][None], "num_vectors": counts}
    padded = np.zeros((len(values), max(map(len, values)), values[0].shape[1]), np.float32)
    for row, vectors in enumerate(values):
        padded[row, : len(vectors)] = vectors
    return {TOKENS: padded, "num_vectors": counts}
