"""Encodes K-quants of GGUF files, which the package ``gguf`` can only read; less exact than llama.cpp's encoder.

A super-block has 256 weights in groups of 16 or 32. Source of the layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_WEIGHTS: Final = 256


def encode(weights: Array, name: str) -> Array:
    """Return the bytes ``[rows, bytes]`` of a matrix ``[rows, columns]``; ``columns`` is a multiple of 256."""
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, _WEIGHTS)
    encoded: Array = ENCODERS[name](blocks)
    return encoded.reshape(len(weights), -1)


def _with_minima(blocks: Array, size: int, highest: int, max_scale: int) -> tuple[Array, Array, Array, Array]:
    """Return numbers up to ``highest`` in groups of ``size``, scales and minima up to ``most``, and fp16 d and dmin."""
    groups = blocks.reshape(len(blocks), -1, size)
    minima = -np.minimum(groups.min(-1), 0)
    scales = (groups.max(-1) + minima) / highest
    d, dmin = (_half(values.max(-1) / max_scale) for values in (scales, minima))
    scales, minima = _divided(scales, d), _divided(minima, dmin)
    shifted = groups + (dmin * minima)[..., None]
    numbers = np.clip(_divided(shifted, (d * scales)[..., None]), 0, highest)
    return numbers.astype(np.uint8), scales.astype(np.uint8), minima.astype(np.uint8), _bytes(d, dmin)


def _symmetric(blocks: Array, lowest: int, max_scale: int) -> tuple[Array, Array, Array]:
    """Return numbers from ``lowest`` (negative) in groups of 16, plus -``lowest``; their scales, and the fp16 d."""
    groups = blocks.reshape(len(blocks), -1, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    scales = extreme / lowest
    d = _half(np.abs(scales).max(-1) / max_scale)
    scales = _divided(scales, d)
    numbers = np.clip(_divided(groups, (d * scales)[..., None]), lowest, -lowest - 1) - lowest
    return numbers.astype(np.uint8), scales.astype(np.int8), _bytes(d)


def _half(values: Array) -> Array:
    return values[:, None].astype(np.float16).astype(np.float32)


def _bytes(*halves: Array) -> Array:
    return np.concatenate(halves, -1).astype(np.float16).view(np.uint8)


def _divided(values: Array, by: Array) -> Array:
    divided: Array = np.round(np.divide(values, by, out=np.zeros_like(values), where=by != 0))
    return divided


def _packed(numbers: Array, bits: int, run: int) -> Array:
    """Pack numbers of ``bits`` bits: a byte holds numbers that are ``run`` apart, the first in its lowest bits."""
    parts = numbers.reshape(len(numbers), -1, 8 // bits, run)
    packed = np.zeros((len(numbers), parts.shape[1], run), np.uint8)
    for part in range(8 // bits):
        packed |= parts[:, :, part] << bits * part
    return packed.reshape(len(numbers), -1)


def _six_bits(scales: Array, minima: Array) -> Array:
    """Pack eight scales and eight minima of six bits into twelve bytes."""
    first = [values[:, :4] | values[:, 4:] >> 4 << 6 for values in (scales, minima)]
    return np.concatenate([*first, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], -1)


def _q2_k(blocks: Array) -> Array:
    numbers, scales, minima, halves = _with_minima(blocks, 16, 3, 15)
    return np.concatenate([scales | minima << 4, _packed(numbers, 2, 32), halves], -1)


def _q3_k(blocks: Array) -> Array:
    numbers, signed, half = _symmetric(blocks, -4, 31)
    scales = (signed + 32).astype(np.uint8)
    high = _packed(numbers >> 2, 1, 32)
    return np.concatenate(
        [high, _packed(numbers & 3, 2, 32), _packed(scales & 15, 4, 8), _packed(scales >> 4, 2, 4), half], -1
    )


def _q4_k(blocks: Array) -> Array:
    numbers, scales, minima, halves = _with_minima(blocks, 32, 15, 63)
    return np.concatenate([halves, _six_bits(scales, minima), _packed(numbers, 4, 32)], -1)


def _q5_k(blocks: Array) -> Array:
    numbers, scales, minima, halves = _with_minima(blocks, 32, 31, 63)
    low, high = _packed(numbers & 15, 4, 32), _packed(numbers >> 4, 1, 32)
    return np.concatenate([halves, _six_bits(scales, minima), high, low], -1)


def _q6_k(blocks: Array) -> Array:
    numbers, scales, half = _symmetric(blocks, -32, 127)
    low, high = _packed(numbers & 15, 4, 64), _packed(numbers >> 4, 2, 32)
    return np.concatenate([low, high, scales.view(np.uint8), half], -1)


#: The encoders by type name.
ENCODERS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
