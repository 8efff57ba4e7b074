"""Converts tensor data between JSON values and the bytes of a :class:`~conch.core.tensors.WireTensor`.

Called by :mod:`conch.wire.json.infer` and :mod:`conch.wire.json.generate`; does no I/O. JSON arrays may be nested in
any way: only the order of their elements matters.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any, Final

from conch.core.errors import internal, invalid
from conch.core.tensors import ELEMENT_SIZE, NATIVE_FORMAT, WireTensor, pack_bytes, split_bytes
from conch.wire.json import text

_DATA: Final = "Unable to parse 'data'"
_BYTES: Final = "Unable to parse JSON bytes array"
_SIGNED: Final = (frozenset({int}), "attempt to access JSON non-signed-integer as signed-integer")
_UNSIGNED: Final = (frozenset({int}), "attempt to access JSON non-unsigned-integer as unsigned-integer")
_DOUBLE: Final = (frozenset({int, float}), "attempt to access JSON non-number as double")
#: The Python types that JSON elements may have, by native format, and the error message for others.
_ELEMENTS: Final[dict[str, tuple[frozenset[type], str]]] = {
    "?": (frozenset({bool}), "attempt to access JSON non-boolean as boolean"),
    **dict.fromkeys("bhiq", _SIGNED),
    **dict.fromkeys("BHIQ", _UNSIGNED),
    **dict.fromkeys("fd", _DOUBLE),
}
_UNSIGNED_OF_SIZE: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def from_json(name: str, datatype: str, count: int, data: Any) -> bytes:
    """Return the bytes of ``count`` elements given as a JSON array, nested or flat.

    ``count`` is not checked for BYTES: request validation does that, with its own message. Raises INTERNAL for elements
    of the wrong type or number, INVALID_ARG for a datatype that JSON cannot carry.
    """
    if datatype == "BYTES":
        return _strings(_flatten(text.as_array(data, _DATA))) if count else b""
    if datatype not in ELEMENT_SIZE:
        raise invalid(f"invalid datatype for input {name}")
    if not count:
        return b""
    if datatype not in NATIVE_FORMAT:
        raise invalid(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    values = _flatten(text.as_array(data, _DATA))
    packed = _numbers(datatype, values[:count])
    if len(values) > count:
        raise internal("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if len(values) < count:
        raise internal("Failed to parse 'data' field: shape does not match true shape")
    return packed


def _flatten(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    while list in kinds:
        if len(kinds) > 1:
            return _flatten_mixed(values)
        values = list(chain.from_iterable(values))
        kinds = set(map(type, values))
    return values


def _flatten_mixed(values: list[Any]) -> list[Any]:
    """Flatten a mix of lists and elements, reading each element once regardless of the depth."""
    flat: list[Any] = []
    levels = [iter(values)]
    while levels:
        for value in levels[-1]:
            if type(value) is list:
                levels.append(iter(value))
                break
            flat.append(value)
        else:
            levels.pop()
    return flat


def _strings(values: list[Any]) -> bytes:
    try:
        try:
            return pack_bytes(map(str.encode, values))
        except UnicodeEncodeError:
            return pack_bytes(map(text.utf8, values))
    except (AttributeError, TypeError):
        raise text.wrong("attempt to access JSON non-string as string", _BYTES) from None


def _numbers(datatype: str, values: list[Any]) -> bytes:
    code = NATIVE_FORMAT[datatype]
    accepted, refusal = _ELEMENTS[code]
    if not accepted.issuperset(map(type, values)):
        raise text.wrong(refusal, _DATA)
    try:
        return bytes(values) if code == "?" else array(code, values).tobytes()
    except OverflowError:
        pass
    # Integers are truncated to the datatype's width, as by a cast in C; each must fit 64 bits.
    low, high = (0, 2**64) if code.isupper() else (-(2**63), 2**63)
    if code in "fd" or min(values) < low or max(values) >= high:
        raise text.wrong(refusal, _DATA)
    size = ELEMENT_SIZE[datatype]
    mask = (1 << 8 * size) - 1
    return array(_UNSIGNED_OF_SIZE[size], [value & mask for value in values]).tobytes()


def to_json(tensor: WireTensor) -> list[Any]:
    """Return the elements of an output, flat: numbers, bools, or strings for :func:`conch.wire.json.text.dumps`.

    Non-finite numbers remain. Raises INVALID_ARG for FP16 and BF16, which JSON does not carry.
    """
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        try:
            return list(map(bytes.decode, elements))
        except UnicodeDecodeError:
            return list(map(text.string, elements))
    code = NATIVE_FORMAT.get(tensor.datatype)
    if code is None:
        raise invalid(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    values: list[Any] = memoryview(tensor.data).cast("B").cast(code).tolist()  # type: ignore[call-overload]
    return values
