"""The outputs of embedding models: how features of a batch become a value per text, and values become tensors.

Dense: ``embedding`` FP32 ``[dimension]``. Sparse: ``sparse_indices`` INT64 ``[-1]``, ascending and padded with -1, and
``sparse_values`` FP32 ``[-1]``, padded with 0. Multi-vector: ``token_embeddings`` FP32 ``[-1, dimension]``, padded with
zeros, and ``num_vectors`` UINT32 ``[1]``. Texts of one request are padded to the longest of them. Dense models with a
network also return its output for each of the ``num_input_tokens``, if a request names it: ``last_hidden_state`` FP32
``[-1, size]``, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.encoders.encoder_task import stacked
from conch.checkpoints.modules import DENSE, MULTI_VECTOR, SENTENCE, SPARSE, TOKENS, EmbeddingModel
from conch.checkpoints.steps import MASK, Features, finish, largest
from conch.core.inference import TensorSpec

COUNT: Final = TensorSpec("num_input_tokens", "UINT32", (1,))
HIDDEN_STATE: Final = TensorSpec("last_hidden_state", "FP32", (-1, -1))


def output_specs(model: EmbeddingModel) -> tuple[TensorSpec, ...]:
    """Return the outputs of a model, without the batch dimension."""
    families = (DENSE, SPARSE, MULTI_VECTOR) if model.heads else (model.family,)
    size = -1 if model.heads else model.dimension
    specs = {
        DENSE: (TensorSpec("embedding", "FP32", (model.dimension,)),),
        SPARSE: (TensorSpec("sparse_indices", "INT64", (-1,)), TensorSpec("sparse_values", "FP32", (-1,))),
        MULTI_VECTOR: (TensorSpec(TOKENS, "FP32", (-1, size)), TensorSpec("num_vectors", "UINT32", (1,))),
    }
    reads_texts = model.networks and all(module.methods is None for module in model.modules)
    hidden = (HIDDEN_STATE,) if reads_texts and families == (DENSE,) else ()
    return (*(spec for family in families for spec in specs[family]), COUNT, *hidden)


#: The values of a text by family: a vector, indices with values, or a vector per token.
Values = Mapping[str, Any]


def values_of(model: EmbeddingModel, features: Features) -> Iterable[Values]:
    """Return the values of each text of a batch."""
    if model.family == MULTI_VECTOR:
        rows = zip(features.arrays[TOKENS], features.arrays[MASK], strict=True)
        return [{MULTI_VECTOR: vectors[real > 0]} for vectors, real in rows]
    vectors = features.arrays[SENTENCE]
    if model.family == DENSE:
        return [{DENSE: vector} for vector in finish(model, vectors)]
    if model.active_dims:
        vectors = largest(vectors, model.active_dims)
    return [{SPARSE: (indices := np.flatnonzero(row), row[indices])} for row in vectors]


def tensors_of(values: Sequence[Values]) -> dict[str, Array]:
    """Return the outputs for the values of a request's texts."""
    makers: dict[str, Callable[[Sequence[Any]], dict[str, Array]]] = {
        DENSE: _dense,
        SPARSE: _sparse,
        MULTI_VECTOR: _vectors,
        HIDDEN_STATE.name: lambda rows: {HIDDEN_STATE.name: _padded(rows)},
    }
    tensors: dict[str, Array] = {}
    for family in values[0]:
        tensors |= makers[family]([own[family] for own in values])
    return tensors


def _dense(vectors: Sequence[Array]) -> dict[str, Array]:
    return {"embedding": stacked(vectors)}


def _sparse(rows: Sequence[tuple[Array, Array]]) -> dict[str, Array]:
    shape = len(rows), max([1, *(len(indices) for indices, _ in rows)])
    positions, weights = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for row, (indices, own) in enumerate(rows):
        positions[row, : len(indices)] = indices
        weights[row, : len(indices)] = own
    return {"sparse_indices": positions, "sparse_values": weights}


def _vectors(rows: Sequence[Array]) -> dict[str, Array]:
    return {TOKENS: _padded(rows), "num_vectors": np.array([[len(vectors)] for vectors in rows], np.uint32)}


def _padded(rows: Sequence[Array]) -> Array:
    """Return FP32 ``[rows, longest, size]``, padded with zeros."""
    if len(rows) == 1:
        return rows[0][None]
    padded = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), np.float32)
    for row, vectors in enumerate(rows):
        padded[row, : len(vectors)] = vectors
    return padded
