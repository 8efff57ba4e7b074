"""The heads of BGE-M3, which compute a sparse vector and a vector per token from the token vectors of a dense model.

Source: FlagEmbedding's ``M3Embedder``. The weights are ``sparse_linear.pt`` and ``colbert_linear.pt`` in the folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import HEADS
from conch.checkpoints.pooling import masked
from conch.core.errors import invalid
from conch.machine import extras

Array = npt.NDArray[Any]


class TokenHeads:
    """Both heads of a checkpoint, which compute a weight and a vector for each token."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._sparse, self._vectors = read_heads(checkpoint)

    def __call__(self, hidden: Array) -> tuple[Array, Array]:
        """Return weights ``[n, length]`` and vectors of length 1 ``[n, length, dimension]``.

        ``hidden`` is FP32 ``[n, length, size]``.
        """
        weight, bias = self._sparse
        weights = np.maximum(hidden @ weight[:, 0] + bias[0], 0)
        weight, bias = self._vectors
        vectors = hidden @ weight + bias
        return weights, vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))


def sparse_rows(weights: Array, ids: Array, mask: Array, unused_ids: Array) -> list[tuple[Array, Array]]:
    """Return the ids of each text's tokens, ascending, and their greatest weights, which are above 0.

    ``weights``, INT64 ``ids`` and ``mask`` are ``[n, length]``. ``unused_ids`` are the tokens without weights: those
    that begin and end a text, …
    """
    weights = np.where((mask == 0) | np.isin(ids, unused_ids), np.float32(0), weights)
    rows = []
    for own, row in zip(ids, weights, strict=True):
        tokens, places = np.unique(own, return_inverse=True)
        greatest = np.zeros(len(tokens), np.float32)
        np.maximum.at(greatest, places, row)
        kept = greatest > 0
        rows.append((tokens[kept], greatest[kept]))
    return rows


def vector_rows(vectors: Array, mask: Array) -> list[Array]:
    """Return the vectors of each text's tokens but the first, FP32 ``[tokens, dimension]``."""
    return [row[real > 0] for row, real in zip(vectors, masked(mask, [1] * len(mask)), strict=True)]


def read_heads(checkpoint: Checkpoint) -> list[tuple[Array, Array]]:
    """Return the weight ``[size, outputs]`` and the bias of both heads, that of sparse vectors first."""
    return [_linear(checkpoint, name) for name in HEADS]


def _linear(checkpoint: Checkpoint, name: str) -> tuple[Array, Array]:
    """Return the weight ``[size, outputs]`` and the bias of a linear layer."""
    extras.require(f"{name} of '{checkpoint.source}'", "torch")
    import torch

    try:
        state = torch.load(checkpoint.directory / name, weights_only=True, map_location="cpu")
        weight, bias = (state[key].float().numpy() for key in ("weight", "bias"))
    except Exception as error:
        raise invalid(f"{checkpoint.directory / name} has no weights of a linear layer: {error}") from None
    return np.ascontiguousarray(weight.T), bias
