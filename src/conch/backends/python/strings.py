"""Converts BYTES tensors between the wire format and numpy; in the wire format, each element follows its length.

Called for every string that a model reads or writes; runs in the worker of a Python model.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from conch.backends.python.errors import TritonModelException
from conch.core.tensors import Buffer

_LENGTH = Struct("<I")
_unpack = _LENGTH.unpack_from
_pack = _LENGTH.pack


def decode(data: Buffer | np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Decode to an object array of ``bytes``. Raises TritonModelException if data and shape do not match."""
    raw = bytes(data)
    elements: list[bytes] = []
    at, end = 0, len(raw)
    while at + 4 <= end:
        start = at + 4
        at = start + _unpack(raw, start - 4)[0]
        elements.append(raw[start:at])
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    if at != end:
        raise TritonModelException("The elements of a BYTES tensor do not fill its data.")
    try:
        return array.reshape(shape)
    except ValueError:
        raise TritonModelException(
            f"A BYTES tensor of shape {list(shape)} came with {len(elements)} elements."
        ) from None


def encode(array: np.ndarray[Any, Any]) -> bytes:
    """Encode in row-major order: bytes unchanged, str as UTF-8, other objects as their ``str()``."""
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        if type(element) is not bytes:
            element = bytes(element) if isinstance(element, bytes) else str(element).encode()
        parts.append(_pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """Encode an array of objects or strings; returns () for an empty array, None for another kind of array."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OSU":
        return None
    return encode(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: Buffer) -> np.ndarray[Any, Any]:
    """Decode to a flat object array."""
    elements = []
    at = 0
    while at < len(encoded_tensor):
        (length,) = _unpack(encoded_tensor, at)
        elements.append(Struct(f"<{length}s").unpack_from(encoded_tensor, at + 4)[0])
        at += 4 + length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
