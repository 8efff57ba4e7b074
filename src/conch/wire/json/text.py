"""Parses JSON with Triton's errors, checks the types of its values, and writes JSON.

Handles the details of JSON itself: nesting, non-finite numbers, text that is not UTF-8, and the messages for values of
the wrong type. Clients of Triton get RapidJSON's messages, so a document that the parser refuses is parsed once more
for RapidJSON's message and offset. Called by every other module of the package; does no I/O.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable
from math import isfinite, isinf
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from conch.core.errors import ConchError, clipped, internal, invalid
from conch.core.tensors import Buffer

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
        value = json.loads(text, parse_float=float_reader(data))
    except json.JSONDecodeError as error:
        raise _parse_error(*reason(data, text, error)) from None
    except NumberTooBig as error:
        raise _parse_error(NUMBER_TOO_BIG, data.find(error.args[0].encode())) from None
    except ValueError:
        # An integer with more digits than the interpreter converts.
        raise _parse_error(NUMBER_TOO_BIG, 0) from None
    if lone := lone_surrogate(data):
        raise _parse_error(*lone)
    return value


def _check_depth(data: bytes) -> None:
    if too_deep(data):
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


def error_message(message: str) -> Any:
    """Prepare the message of an error for :func:`dumps`; a long one is clipped."""
    return string(utf8(clipped(message)))


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


NUMBER_TOO_BIG: Final = "Number too big to be stored in double."

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
# An unterminated string matches up to the end; otherwise each quote in it would be tried in turn.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_LONE_HIGH_SURROGATE: Final = re.compile(rb"(?<!\\)(?:\\\\)*+(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")
_MAYBE_TOO_BIG: Final = re.compile(rb"[eE]\+?[0-9]{3}")
_LITERALS: Final = (b"true", b"false", b"null", b"NaN", b"Infinity", b"-Infinity")

#: Prefixes of the standard library's messages, and RapidJSON's messages.
_REASONS: Final = {
    "Expecting property name": "Missing a name for object member.",
    "Expecting ':'": "Missing a colon after a name of object member.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid control character": "Invalid escape character in string.",
    "Extra data": "The document root must not be followed by other values.",
}


class NumberTooBig(ValueError):
    """A number too large for a double; the argument is its text."""


def float_reader(data: bytes) -> Callable[[str], float] | None:
    """Return the function that parses the floats of a document; None, which is faster, if no exponent is large."""
    return _finite if _MAYBE_TOO_BIG.search(data) else None


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise NumberTooBig(text)
    return value


def too_deep(data: bytes) -> bool:
    """Whether arrays and objects in a document are nested deeper than :data:`MAX_DEPTH`."""
    return data.count(b"[") + data.count(b"{") > MAX_DEPTH and nesting(data) > MAX_DEPTH


def nesting(data: bytes) -> int:
    """Return the nesting depth of arrays and objects in a document, at most 127."""
    _, depths = _brackets(data)
    return int(depths.max(initial=0))


def lone_surrogate(data: bytes) -> tuple[str, int] | None:
    """Return RapidJSON's message and offset for an escaped lone high surrogate, which Python would accept."""
    if b"\\u" not in data:
        return None
    match = _LONE_HIGH_SURROGATE.search(data)
    return ("The surrogate pair in string is invalid.", match.start(1)) if match else None


def reason(data: bytes, text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """Return RapidJSON's message and byte offset for the standard library's error in ``data``, decoded as ``text``."""
    if not text.strip(" \t\n\r"):
        return "The document is empty.", len(data)
    at = len(text[: error.pos].encode("utf-8", "surrogateescape"))
    message = error.msg
    if message.startswith("Unterminated string"):
        return "Missing a closing quotation mark in string.", len(data)
    if message.startswith("Expecting value"):
        return "Invalid value.", at + _literal_prefix(data[at : at + 9])
    if message.startswith("Illegal trailing comma"):  # Python 3.13 points at the comma, RapidJSON after it
        behind = text[error.pos + 1 :]
        at += 1 + len(behind) - len(behind.lstrip(" \t\n\r"))
        return _REASONS["Expecting property name"] if "object" in message else "Invalid value.", at
    cut = data[at : at + 1]
    if cut in (b".", b"e", b"E") and data[at - 1 : at].isdigit():
        if cut == b".":
            return "Miss fraction part in number.", at + 1
        return "Miss exponent in number.", at + 1 + (data[at + 1 : at + 2] in (b"+", b"-"))
    if message.startswith("Invalid \\uXXXX escape"):
        return "Incorrect hex digit after \\u escape in string.", at - 1
    for begins, words in _REASONS.items():
        if message.startswith(begins):
            return words, at
    if _innermost(data[:at]) == b"{":
        return "Missing a comma or '}' after an object member.", at
    return "Missing a comma or ']' after an array element.", at


def _literal_prefix(data: bytes) -> int:
    """Return the number of bytes that could begin a literal; RapidJSON's offset is after them."""
    best = 0
    for literal in _LITERALS:
        length = 0
        while length < len(literal) and literal[length : length + 1] == data[length : length + 1]:
            length += 1
        best = max(best, length)
    return best


def _brackets(data: bytes) -> tuple[bytes, NDArray[np.int8]]:
    """Return the brackets outside strings and the depth after each.

    Eight bits are enough: depths change by one, so 101 is seen before a depth overflows.
    """
    brackets = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    steps = np.frombuffer(brackets.translate(_STEPS), np.int8)
    return brackets, np.cumsum(steps, dtype=np.int8)


def _innermost(data: bytes) -> bytes:
    """Return the bracket that is open at the end of ``data``, the beginning of a document."""
    brackets, depths = _brackets(data)
    if not len(depths):
        return b""
    opening = np.frombuffer(brackets.translate(_STEPS), np.int8) == 1
    last = int(np.flatnonzero(opening & (depths == depths[-1]))[-1])
    return brackets[last : last + 1]
