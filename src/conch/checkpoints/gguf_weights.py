"""The weights of a GGUF file in float32, decoded a few rows at a time.

``gguf.DECODERS`` has the types that engine ``openvino`` computes with; this module adds the other common types. The
package ``gguf`` decodes the rest (IQ1, IQ2, IQ3, ternary types), whose tables of values are large. Source of the
layouts: ggml's ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from time import thread_time
from typing import Any, Final

import numpy as np

from conch.checkpoints.gguf import (
    DECODERS,
    Bytes,
    Floats,
    GgufFile,
    TensorData,
    TensorInfo,
    block_bytes,
    half,
    k_scales,
    read_blocks,
    type_name,
)
from conch.core.errors import invalid

#: Number of weights that a thread decodes at a time.
_DECODED: Final = 1 << 19
#: Number of multiplications up to which OpenBLAS uses only the calling thread. Its own threads are slow for such small
#: products on a busy machine.
_ONE_THREAD: Final = 1 << 19


class GgufWeights:
    """The tensors of a file; ``used`` has the names of those that were read.

    ``pool`` multiplies parts of a matrix in parallel; ``seconds`` is the processor time of these parts. Methods raise
    INVALID_ARG for a tensor that is missing or has another shape.
    """

    def __init__(self, file: GgufFile, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._data = TensorData(file)
        self.used: set[str] = set()
        self.seconds = 0.0

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensor(name).shape

    def vector(self, name: str, *sizes: int) -> Floats:
        """Return a vector, whose length is one of ``sizes``."""
        tensor = self._tensor(name)
        if len(tensor.shape) != 1 or tensor.shape[0] not in sizes:
            raise self._wrong(tensor, " or ".join(f"({size},)" for size in sizes))
        values: Floats = dequantize(self._rows(tensor), tensor.type)[0]
        return values

    def rows(self, name: str, indices: Sequence[int], columns: int) -> Floats:
        """Return some rows of a matrix."""
        tensor = self._tensor(name)
        if len(tensor.shape) != 2 or tensor.shape[1] != columns or max(indices, default=0) >= tensor.shape[0]:
            raise self._wrong(tensor, f"(more than {max(indices, default=0)}, {columns})")
        return dequantize(self._rows(tensor)[list(indices)], tensor.type)

    def multiply(self, inputs: Floats, name: str, rows: int, expert: int | None = None) -> Floats:
        """Return ``inputs`` ``[tokens, columns]`` times a matrix ``[rows, columns]``, or that of an expert."""
        tensor = self._tensor(name)
        expected = (rows, inputs.shape[1])
        if tensor.shape[-2:] != expected or len(tensor.shape) != (2 if expert is None else 3):
            raise self._wrong(tensor, str(expected if expert is None else ("experts", *expected)))
        raw = self._rows(tensor)
        if expert is not None:
            if expert >= tensor.shape[0]:
                raise self._wrong(tensor, f"more than {expert} experts")
            raw = raw[expert * rows : (expert + 1) * rows]
        height = max(1, _DECODED // max(inputs.shape[1], 1))
        columns = np.ascontiguousarray(inputs.T)

        def part(start: int) -> tuple[Floats, float]:
            began = thread_time()
            with np.errstate(all="ignore"):
                product = _product(dequantize(raw[start : start + height], tensor.type), columns)
            return product, thread_time() - began

        parts = list(self._pool.map(part, range(0, rows, height)))
        self.seconds += sum(seconds for _, seconds in parts)
        return np.ascontiguousarray(np.concatenate([product for product, _ in parts]).T)

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise invalid(f"{self._file.path} has no tensor '{name}'")
        self.used.add(name)
        return tensor

    def _rows(self, tensor: TensorInfo) -> Bytes:
        """Return the bytes of a tensor, a row of the last dimension in each row."""
        count = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return self._data.of(tensor).reshape(count, tensor.size // count if count else 0)

    def _wrong(self, tensor: TensorInfo, expected: str) -> Exception:
        return invalid(f"{self._file.path}: tensor '{tensor.name}' has shape {tensor.shape} instead of {expected}")


def decodable(kind: int) -> bool:
    """Whether ``dequantize`` can decode a tensor type in this environment."""
    name = type_name(kind)
    return name in _PLAIN or name in DECODERS or name in _VALUES or _of_package(name) is not None


def dequantize(rows: Bytes, kind: int) -> Floats:
    """Decode the bytes ``[rows, bytes]`` of a tensor to float32 ``[rows, columns]``.

    Raises INVALID_ARG for a type that cannot be decoded here.
    """
    name = type_name(kind)
    values: Floats
    if name == "BF16":
        values = (np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif name in _PLAIN:
        values = np.ascontiguousarray(rows).view(_PLAIN[name]).astype(np.float32, copy=False)
    elif name in DECODERS:
        blocks = read_blocks(rows, kind)
        values = blocks.numbers * blocks.scales[..., None]
        values += blocks.minima[..., None]
    elif name in _VALUES:
        values = _VALUES[name](np.ascontiguousarray(rows).reshape(-1, block_bytes(kind)))
    elif (package_type := _of_package(name)) is not None:
        values = import_module("gguf").dequantize(np.ascontiguousarray(rows), package_type)
    else:
        raise invalid(f"tensors of type {name} can only be decoded with the package gguf")
    return values.reshape(len(rows), -1)


def _product(matrix: Floats, columns: Floats) -> Floats:
    """Return ``matrix @ columns``, as many small products that each use only this thread."""
    rows, size = matrix.shape
    height = max(1, _ONE_THREAD // max(columns.size, 1))
    whole = rows - rows % height
    stacked = matrix[:whole].reshape(-1, height, size) @ columns
    return np.concatenate([stacked.reshape(whole, columns.shape[1]), matrix[whole:] @ columns])


def _of_package(name: str) -> Any:
    """Return the type in the package ``gguf`` if that is installed and decodes the type, else None."""
    return _package_type(name) if find_spec("gguf") is not None else None


@cache
def _package_type(name: str) -> Any:
    gguf = import_module("gguf")
    package_type = getattr(gguf.GGMLQuantizationType, name, None)
    if package_type is None:
        return None
    _, width = gguf.GGML_QUANT_SIZES[package_type]
    try:
        gguf.dequantize(np.zeros((1, width), np.uint8), package_type)
    except NotImplementedError:
        return None
    return package_type


_PLAIN: Final[Mapping[str, Any]] = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
#: The values of 4-bit numbers in IQ4_NL and IQ4_XS, and in MXFP4 (doubled).
_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _bits(packed: Bytes, width: int, run: int) -> Bytes:
    """Unpack numbers of ``width`` bits: the lowest bits of ``run`` bytes, then the next bits of the same bytes …"""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Return 32 bits of each block, as numbers with the value 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Floats:
    numbers = _bits(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)
    return half(blocks, 0) * (numbers.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    numbers = _bits(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return half(blocks, 0) * numbers.astype(np.float32) + half(blocks, 2)


def _groups(numbers: Any, scales: Floats, minima: Floats | None = None) -> Floats:
    """Return ``scales * numbers - minima``; ``scales`` and ``minima`` are ``[blocks, groups]``."""
    values: Floats = numbers.reshape(*scales.shape, -1) * scales[..., None]
    if minima is not None:
        values -= minima[..., None]
    return values


def _q2_k(blocks: Bytes) -> Floats:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _groups(_bits(blocks[:, 16:80], 2, 32), half(blocks, 80) * scales, half(blocks, 82) * minima)


def _q3_k(blocks: Bytes) -> Floats:
    high = _bits(blocks[:, :32], 1, 32)
    numbers = (_bits(blocks[:, 32:96], 2, 32) | high << 2).astype(np.float32) - 4
    scales = _bits(blocks[:, 96:104], 4, 8) | _bits(blocks[:, 104:108], 2, 4) << 4
    return _groups(numbers, half(blocks, 108) * (scales.astype(np.float32) - 32))


def _q5_k(blocks: Bytes) -> Floats:
    numbers = _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return _groups(numbers, *k_scales(blocks))


def _iq4_nl(blocks: Bytes) -> Floats:
    values: Floats = half(blocks, 0) * _IQ4[_bits(blocks[:, 2:], 4, 16)]
    return values


def _iq4_xs(blocks: Bytes) -> Floats:
    high = _bits(blocks[:, 2:4], 2, 1)
    scales = (_bits(blocks[:, 4:8], 4, 1) | high << 4).astype(np.float32) - 32
    return _groups(_IQ4[_bits(blocks[:, 8:], 4, 16)], half(blocks, 0) * scales)


def _mxfp4(blocks: Bytes) -> Floats:
    # Half of two to the power of the exponent, because the values are doubled.
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    values: Floats = scales * _FP4[_bits(blocks[:, 1:], 4, 16)]
    return values


_VALUES: Final[Mapping[str, Callable[[Bytes], Floats]]] = {
    "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q5_K": _q5_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}  # fmt: skip
