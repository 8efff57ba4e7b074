"""Parses JSON with Triton's errors, checks the types of its values, and writes JSON.

Handles the details of JSON itself: nesting, non-finite numbers, text that is not UTF-8, and the messages for values of
the wrong type. Called by every other module of the package; does no I/O.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from math import isfinite
from typing import Any, Final

import orjson

from conch.core.errors import ConchError, internal, invalid
from conch.core.tensors import Buffer
from conch.wire.json import malformed

MAX_DEPTH: Final = 100
_MAX_UNSIGNED: Final = 2**64 - 1


def loads(data: Buffer) -> Any:
    """Parse a JSON document, which may contain ``NaN``, ``Infinity`` and ``-Infinity``.

    Raises INTERNAL (HTTP 500) for malformed text, as Triton does, and INVALID_ARG for a document nested deeper than
    :data:`MAX_DEPTH`. Bytes that are not UTF-8 become surrogates, which :func:`utf8` converts back.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _loads_leniently(bytes(data))
    if len(data) > MAX_DEPTH:
        _check_depth(bytes(data))
    return value


def members(data: bytes | bytearray) -> list[str]:
    """Return the member names of a document that :func:`loads` has parsed, including duplicates."""
    value = json.loads(data.removeprefix(BOM_UTF8).decode("utf-8", "surrogateescape"), object_pairs_hook=list)
    return [name for name, _ in value]


def _loads_leniently(data: bytes) -> Any:
    """Parse a document that orjson refuses: RapidJSON may accept it; otherwise the error is RapidJSON's."""
    data = data.removeprefix(BOM_UTF8)
    _check_depth(data)
    text = data.decode("utf-8", "surrogateescape")
    try:
        value = json.loads(text, parse_float=malformed.float_reader(data))
    except json.JSONDecodeError as error:
        raise _parse_error(*malformed.reason(data, text, error)) from None
    except malformed.NumberTooBig as error:
        raise _parse_error(malformed.NUMBER_TOO_BIG, data.find(error.args[0].encode())) from None
    except ValueError:
        # An integer with more digits than the interpreter converts.
        raise _parse_error(malformed.NUMBER_TOO_BIG, 0) from None
    if lone := malformed.lone_surrogate(data):
        raise _parse_error(*lone)
    return value


def _check_depth(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and malformed.nesting(data) > MAX_DEPTH:
        raise invalid(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def _parse_error(reason: str, offset: int) -> ConchError:
    return internal(f"failed to parse the request JSON buffer: {reason} at {offset}")


def dumps(value: Any, *, sort: bool = False) -> bytes:
    """Encode compact JSON; non-finite values must first pass through :func:`numbers`, bytes through :func:`string`."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)


def numbers(value: Any, elements: list[Any] | None = None) -> Any:
    """Prepare a number, or a list of one type, for :func:`dumps`; non-finite values become bare words, as in Triton.

    For a nested list, ``elements`` are all its elements.
    """
    if type(value) is list:
        elements = value if elements is None else elements
        finite = not elements or type(elements[0]) is not float or isfinite(sum(elements))
    else:
        finite = type(value) is not float or isfinite(value)
    return value if finite else orjson.Fragment(json.dumps(value, separators=(",", ":")))


def string(value: bytes) -> Any:
    """Prepare a string for :func:`dumps`; bytes that are not UTF-8 are written unchanged, as in Triton."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        text = json.dumps(value.decode("utf-8", "surrogateescape"), ensure_ascii=False)
        return orjson.Fragment(text.encode("utf-8", "surrogateescape"))


def utf8(value: str) -> bytes:
    """Return the bytes of a string that :func:`loads` parsed."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        # Either bytes that were not UTF-8, or escapes of half a surrogate pair.
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass")


def wrong(text: str, context: str = "") -> ConchError:
    """Return the error for a value of the wrong type (HTTP 500, as in Triton); ``context`` names the location."""
    return internal(f"{context}: {text}" if context else text)


def member(value: Any, name: str, context: str = "") -> Any:
    """Return a member of an object; raises INTERNAL if it is missing."""
    if isinstance(value, dict) and name in value:
        return value[name]
    raise wrong(f"attempt to access non-existing object member '{name}'", context)


def as_string(value: Any, context: str = "") -> str:
    """Return a string that is valid UTF-8; only tensor data may be something else, see :func:`utf8`."""
    if type(value) is not str:
        raise wrong("attempt to access JSON non-string as string", context)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid("names, identifiers and parameters must be valid UTF-8") from None
    return value


def as_bool(value: Any, context: str = "") -> bool:
    if type(value) is bool:
        return value
    raise wrong("attempt to access JSON non-boolean as boolean", context)


def as_unsigned(value: Any, context: str = "") -> int:
    if type(value) is int and 0 <= value <= _MAX_UNSIGNED:
        return value
    raise wrong("attempt to access JSON non-unsigned-integer as unsigned-integer", context)


def as_array(value: Any, context: str = "") -> list[Any]:
    if type(value) is list:
        return value
    raise wrong("attempt to access JSON non-array as array", context)


def as_object(value: Any, context: str = "") -> dict[str, Any]:
    if type(value) is dict:
        return value
    raise wrong("attempt to access JSON non-object as object", context)


def as_members(value: Any, context: str = "") -> dict[str, Any]:
    """Return an object to iterate over; the error for another type differs from :func:`as_object`."""
    if type(value) is dict:
        return value
    raise wrong("attempt to get members for non-object", context)


def optional_object(value: Any, name: str) -> dict[str, Any]:
    """Return a member that is an object; anything else counts as missing, as in Triton."""
    item = value.get(name) if type(value) is dict else None
    return item if type(item) is dict else {}
