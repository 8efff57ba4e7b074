"""Pools a value per token to one per text: token vectors by the modes of Pooling, logits of words by SpladePooling.

Source: the modules of these names in sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.checkpoints.modules import Module
from conch.core.errors import unsupported

Array = npt.NDArray[Any]


def pool(mode: str, hidden: Array, mask: Array | None) -> Array:
    """Pool FP32 ``[n, length, size]`` to ``[n, size]``.

    INT64 ``mask`` ``[n, length]`` is 0 for excluded tokens; None includes all tokens.
    """
    if mask is None:
        if mode == "mean":
            return np.asarray(np.add.reduce(hidden, 1) / np.float32(hidden.shape[1]))
        mask = np.ones(hidden.shape[:2], np.int64)
    rows = np.arange(len(hidden))
    if mode == "cls":
        return np.asarray(hidden[rows, mask.argmax(1)])
    if mode == "lasttoken":
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        return np.asarray(hidden[rows, last] * mask[rows, last, None].astype(np.float32))
    if mode == "max":
        return np.asarray(np.where(mask[:, :, None] > 0, hidden, np.float32("-inf")).max(1))
    weights = mask.astype(np.float32)
    if mode == "weightedmean":
        weights *= np.arange(1, mask.shape[1] + 1, dtype=np.float32)
    total = np.maximum(weights.sum(1, keepdims=True), np.float32(1e-9))
    weights /= np.sqrt(total) if mode == "mean_sqrt_len_tokens" else total
    # Not matmul, because its library starts threads that compete with those of the engine.
    return np.asarray(np.einsum("nl,nld->nd", weights, hidden))


def masked(mask: Array, skip: Sequence[int]) -> Array:
    """Return a copy of ``mask`` that excludes the first ``skip`` tokens of each row."""
    kept = mask.copy()
    for row, count in enumerate(skip):
        kept[row, :count] = 0
    return kept


def splade_settings(module: Module) -> tuple[str, bool]:
    """Return the strategy of a SpladePooling module (``max``, ``sum``), and whether it takes the logarithm twice."""
    strategy = str(module.config.get("pooling_strategy", "max"))
    activation = str(module.config.get("activation_function", "relu"))
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise unsupported(f"the module 'SpladePooling' has the strategy '{strategy}' with '{activation}'")
    return strategy, activation == "log1p_relu"


def saturated(logits: Array, twice: bool) -> Array:
    """Return log(1 + max(0, x)), or the logarithm of 1 more than that, of the logits of words."""
    values = np.log1p(np.maximum(logits, 0))
    return np.asarray(np.log1p(values) if twice else values)


def pool_words(logits: Array, mask: Array, strategy: str, twice: bool) -> Array:
    """Pool FP32 logits ``[n, length, vocabulary]`` to ``[n, vocabulary]``; ``strategy`` is ``max`` or ``sum``."""
    if strategy == "max":
        # The activation is monotonic and 0 for padding, so the maximum of the logits is enough.
        return saturated(np.where(mask[:, :, None] > 0, logits, 0).max(1), twice)
    # One text at a time bounds the memory.
    rows = zip(logits, mask, strict=True)
    return np.stack([saturated(row[real > 0], twice).sum(0) for row, real in rows])
