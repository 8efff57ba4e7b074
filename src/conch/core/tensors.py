"""Datatypes, and tensors as serialized for protocols: a datatype name, a shape and the raw bytes.

Used by the server and by workers (standard library only). Data is little-endian and row-major; each BYTES element is
preceded by its length in 4 little-endian bytes. Source: the tensor representation and the binary data extension of the
KServe v2 protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Union

from conch.core.errors import invalid

Buffer = Union[bytes, bytearray, memoryview]


class Loan(NamedTuple):
    """``size`` bytes at ``offset`` of the file ``fd``, valid as long as ``owner`` is referenced."""

    owner: object
    fd: int
    offset: int
    size: int


class StoredData:
    """Tensor bytes in shared memory that are copied only when they are needed.

    Replaces a ``Buffer`` in inputs of at least ``workers.child.packing.INLINE_LIMIT`` bytes that are not BYTES;
    ``bytes(data)`` is a copy.
    """

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def read_into(self, target: memoryview) -> None:
        """Copy all bytes to ``target``; never raises, but writes zeros for unreadable data."""
        raise NotImplementedError

    def lend(self) -> Loan | None:
        """Return memory from which a worker can read the bytes directly; None if this process must read them."""
        return None

    def hold(self) -> None:
        """Reserve bytes for a copy that the request keeps. Raises UNAVAILABLE if the server holds too many bytes."""

    def __bytes__(self) -> bytes:
        data = bytearray(len(self))
        self.read_into(memoryview(data))
        return bytes(data)


#: Bytes per element by protocol name; BYTES has no fixed size.
ELEMENT_SIZE: dict[str, int] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip

#: Names of the configuration's enum ``DataType`` by protocol name.
CONFIG_NAME: dict[str, str] = {name: f"TYPE_{name}" for name in ELEMENT_SIZE}
CONFIG_NAME["BYTES"] = "TYPE_STRING"
PROTOCOL_NAME: dict[str, str] = {config: name for name, config in CONFIG_NAME.items()}

#: Format characters of ``struct``, ``array`` and ``memoryview.cast`` by protocol name.
NATIVE_FORMAT: dict[str, str] = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip

MAX_ELEMENTS = 2**63 - 1
_LENGTH = struct.Struct("<I")


def plain(data: Buffer) -> Buffer:
    """Return the bytes of a tensor; shared memory is read at this point."""
    return data if isinstance(data, (bytes, bytearray, memoryview)) else bytes(data)


class WireTensor:
    """A named tensor with its serialized bytes.

    ``datatype`` is the protocol's name (``FP32``, ``BYTES`` …). ``shape`` includes the batch dimension if the model has
    one. ``data`` is a contiguous buffer of bytes. ``elements`` is the number of well-formed BYTES elements in ``data``;
    None until they are counted.
    """

    __slots__ = ("data", "datatype", "elements", "name", "shape")

    def __init__(
        self, name: str, datatype: str, shape: tuple[int, ...], data: Buffer, elements: int | None = None
    ) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data
        self.elements = elements

    def __repr__(self) -> str:
        return f"WireTensor({self.name!r}, {self.datatype}, {list(self.shape)}, {len(self.data)} bytes)"


def pack_bytes(elements: Iterable[bytes]) -> bytes:
    """Serialize BYTES elements, each preceded by its length."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(_LENGTH.pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def split_bytes(data: Buffer) -> list[bytes]:
    """Split serialized BYTES into elements.

    Raises INVALID_ARG if a length is truncated or exceeds the remaining data.
    """
    view = memoryview(data)
    end = len(view)
    elements: list[bytes] = []
    at = 0
    while at < end:
        start = at + 4
        if start > end:
            raise invalid(f"incomplete string length indicator: expecting 4 bytes but only {end - at} bytes available")
        at = start + _LENGTH.unpack_from(view, start - 4)[0]
        if at > end:
            raise invalid(f"incomplete string: expecting {at - start} bytes but only {end - start} bytes available")
        elements.append(bytes(view[start:at]))
    return elements


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape as in Triton's messages: ``[-1,16]``."""
    return "[" + ",".join(map(str, shape)) + "]"
