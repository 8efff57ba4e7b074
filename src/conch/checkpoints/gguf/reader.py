"""Reads the metadata and tensor locations of GGUF files when a checkpoint is opened.

Files are untrusted: all sizes are checked against the size of the file before memory is allocated. Source of the
layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.config.reading import open_regular
from conch.core.errors import ConchError, invalid

_MAGIC: Final = b"GGUF"
_LFS_POINTER: Final = b"version https://git-lfs"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_FLOAT32: Final = 6
#: Formats of ``struct`` by value type.
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT32: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
#: ggml's tensor types: the name, the numbers per block and the bytes per block.
_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_UNQUANTISED: Final = ("F32", "F16", "BF16")
#: Limits that no model reaches, so that a malicious file takes seconds to read and not hours.
_MOST_ENTRIES: Final = 100_000
_MOST_TEXTS: Final = 8_000_000
_MOST_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location of a tensor: ``shape`` in numpy's order; ``offset`` in the file and ``size`` in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file: its ``metadata``, with lists of numbers as numpy arrays, and its ``tensors`` by name."""

    path: Path
    version: int
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def quantised(self) -> bool:
        """Whether the file has a matrix of a type other than F32, F16 and BF16."""
        return any(
            type_name(tensor.type) not in _UNQUANTISED for tensor in self.tensors.values() if len(tensor.shape) > 1
        )

    def text(self, key: str, default: str = "") -> str:
        """Return a text in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: str = self._typed(key, default, str, "a text")
        return value

    def integer(self, key: str, default: int = -1) -> int:
        """Return an integer in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: int = self._typed(key, default, int, "a whole number")
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        """Return a number in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float):
            raise invalid(f"{self.path}: {key} must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean in the metadata. Raises INVALID_ARG, naming the key, for another type."""
        value: bool = self._typed(key, default, bool, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts in the metadata, empty without one. Raises INVALID_ARG for another type."""
        value: list[str] = self._typed(key, [], list, "a list of texts")
        if value and not isinstance(value[0], str):
            raise invalid(f"{self.path}: {key} must be a list of texts")
        return value

    def numbers(self, key: str) -> list[Any]:
        """Return a list of numbers in the metadata, empty without one. Raises INVALID_ARG for another type."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray):
            raise invalid(f"{self.path}: {key} must be a list of numbers")
        return list(value.tolist())

    def _typed(self, key: str, default: Any, kind: type, wanted: str) -> Any:
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise invalid(f"{self.path}: {key} must be {wanted}")
        return value


def type_name(kind: int) -> str:
    """Return ggml's name for a tensor type."""
    return _TYPES[kind][0]


def block_bytes(kind: int) -> int:
    """Return the size of a block of a tensor type (bytes)."""
    return _TYPES[kind][2]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and tensor locations of a file. Raises INVALID_ARG if it is invalid or truncated."""
    try:
        return _read(path)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror or error}") from None


def _read(path: Path) -> GgufFile:
    with open_regular(path) as file:
        beginning = file.read(len(_LFS_POINTER))
        if beginning == _LFS_POINTER:
            raise invalid(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' there")
        if not beginning.startswith(_MAGIC):
            raise invalid(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()


class _Reader:
    """Reads a file sequentially from its beginning."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._at = len(_MAGIC)
        self._texts = 0

    def read(self) -> GgufFile:
        version = self._unpack("I")
        if version not in _VERSIONS:
            kind = f"version {version}" if version & 0xFFFF else "big-endian numbers"
            raise invalid(f"{self._path} is a GGUF file with {kind}; versions 2 and 3, little-endian, are read")
        tensors, entries = self._count("Q", 24), self._count("Q", 12)
        if max(tensors, entries) > _MOST_ENTRIES:
            raise self._wrong(f"it claims {tensors} tensors and {entries} values")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            metadata[key] = self._value(self._unpack("I"))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._wrong("general.alignment is not a reasonable number")
        infos = [self._tensor() for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, version, metadata, self._placed(infos, start))

    def _placed(self, infos: Sequence[TensorInfo], start: int) -> dict[str, TensorInfo]:
        placed = {
            info.name: TensorInfo(info.name, info.shape, info.type, start + info.offset, info.size) for info in infos
        }
        if len(placed) != len(infos):
            raise self._wrong("two tensors have the same name")
        end = max((tensor.offset + tensor.size for tensor in placed.values()), default=0)
        if end > self._size:
            raise invalid(f"{self._path} was cut off: it has {self._size} of {end} bytes")
        return placed

    def _tensor(self) -> TensorInfo:
        name = self._text()
        dimensions = self._unpack("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._wrong(f"tensor '{name[:100]}' has {dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(dimensions))
        kind, offset = self._unpack("I"), self._unpack("Q")
        if kind not in _TYPES:
            raise invalid(f"{self._path}: tensor '{name[:100]}' is of type {kind}, which is not known here")
        numbers = 1
        for dimension in shape:
            numbers *= dimension
        _, block, width = _TYPES[kind]
        if numbers % block:
            raise self._wrong(f"tensor '{name[:100]}' has no whole number of blocks")
        return TensorInfo(name, shape[::-1], kind, offset, numbers // block * width)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._list(self._unpack("I"))
        if kind not in _SCALARS:
            raise self._wrong(f"a value is of type {kind}")
        value = self._unpack(_SCALARS[kind])
        # The shortest decimal that rounds to the 32-bit float (1e-05), as in a config.json, not its exact value.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _list(self, kind: int) -> Any:
        if kind == _STRING:
            count = self._count("Q", 8)
            self._texts += count
            if self._texts > _MOST_TEXTS:
                raise self._wrong("it has more texts than any model")
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._wrong("it has lists of lists" if kind == _ARRAY else f"a list is of type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        count = self._count("Q", dtype.itemsize)
        return np.frombuffer(self._taken(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        return self._taken(self._count("Q", 1)).decode("utf-8", "replace")

    def _count(self, form: str, width: int) -> int:
        """Read a number of elements. Raises INVALID_ARG if the file is too short for ``width`` bytes per element."""
        count: int = self._unpack(form)
        if count * width > self._size - self._at:
            raise self._cut()
        return count

    def _unpack(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._taken(struct.calcsize(f"<{form}")))[0]

    def _taken(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > self._size:
            raise self._cut()
        return self._content[start : self._at]

    def _cut(self) -> ConchError:
        return self._wrong("it was cut off, or claims more than it holds")

    def _wrong(self, why: str) -> ConchError:
        return invalid(f"{self._path} is not a GGUF file that can be read: {why}")
