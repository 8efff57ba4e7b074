"""Tensor data between JSON values and the bytes that tensors are kept as.

Called by :mod:`conch.wire.json.infer` and :mod:`conch.wire.json.generate`.  JSON arrays may be
nested in any way; only their elements, in order, matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from conch.errors import internal, invalid
from conch.tensors import ELEMENT_SIZE, NATIVE_FORMAT, Tensor, pack_bytes, split_bytes
from conch.wire.json import text

_DATA: Final = "Unable to parse 'data'"
_BYTES: Final = "Unable to parse JSON bytes array"
_UNSIGNED_OF_SIZE: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def from_json(name: str, datatype: str, count: int, data: Any) -> bytes:
    """The bytes of ``count`` elements given as a JSON array, nested or flat.

    ``count`` is not checked for BYTES: request validation does that, with its own words.  Raises
    INTERNAL for elements of the wrong type or number, INVALID_ARG for a datatype that JSON cannot carry.
    """
    if datatype == "BYTES":
        return _strings(_flatten(text.as_array(data, _DATA))) if count else b""
    code = NATIVE_FORMAT.get(datatype)
    if code is None:
        if datatype in ELEMENT_SIZE:
            raise invalid(
                f"receiving {datatype} data via JSON is not supported."
                f" Please use the binary data format for input {name}"
            )
        raise invalid(f"invalid datatype for input {name}")
    values = text.as_array(data, _DATA)
    if not count:
        return b""
    values = _flatten(values)
    if len(values) > count:
        _numbers(datatype, code, values[:count])
        raise internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    packed = _numbers(datatype, code, values)
    if len(values) < count:
        raise internal("Failed to parse 'data' field: shape does not match true shape")
    return packed


def _flatten(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    while list in kinds:
        nested = values if len(kinds) == 1 else [value if type(value) is list else [value] for value in values]
        values = list(chain.from_iterable(nested))
        kinds = set(map(type, values))
    return values


def _strings(values: list[Any]) -> bytes:
    try:
        return pack_bytes(map(str.encode, values))
    except UnicodeEncodeError:
        return pack_bytes(map(text.utf8, values))
    except TypeError:
        raise text.wrong("attempt to access JSON non-string as string", _BYTES) from None


def _numbers(datatype: str, code: str, values: list[Any]) -> bytes:
    kinds = set(map(type, values))
    if datatype == "BOOL":
        if kinds - {bool}:
            raise text.wrong("attempt to access JSON non-boolean as boolean", _DATA)
        return bytes(values)
    try:
        if code in "fd":
            if kinds - {float, int}:
                raise text.wrong("attempt to access JSON non-number as double", _DATA)
        elif kinds - {int}:
            raise _not_an_integer(datatype)
        return array(code, values).tobytes()
    except OverflowError:
        return _truncated(datatype, values)


def _truncated(datatype: str, values: Sequence[int]) -> bytes:
    """Integers reduced to the datatype's width, as a cast in C does; each must fit 64 bits."""
    low, high = (0, 2**64) if datatype.startswith("U") else (-(2**63), 2**63)
    if min(values) < low or max(values) >= high:
        raise _not_an_integer(datatype)
    size = ELEMENT_SIZE[datatype]
    mask = (1 << 8 * size) - 1
    return array(_UNSIGNED_OF_SIZE[size], [value & mask for value in values]).tobytes()


def _not_an_integer(datatype: str) -> Exception:
    kind = "unsigned" if datatype.startswith("U") else "signed"
    return text.wrong(f"attempt to access JSON non-{kind}-integer as {kind}-integer", _DATA)


def to_json(tensor: Tensor) -> list[Any] | Any:
    """The elements of an output as what :func:`conch.wire.json.text.dumps` writes: always flat.

    Raises INVALID_ARG for FP16 and BF16, which JSON does not carry.
    """
    datatype = tensor.datatype
    if datatype == "BYTES":
        elements = split_bytes(tensor.data)
        try:
            return list(map(bytes.decode, elements))
        except UnicodeDecodeError:
            return list(map(text.string, elements))
    code = NATIVE_FORMAT.get(datatype)
    if code is None:
        raise invalid(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    values = memoryview(tensor.data).cast("B").cast(code).tolist()
    return text.number_list(values) if code in "fd" else values
