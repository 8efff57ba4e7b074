"""Reports why a JSON document is invalid, with RapidJSON's messages and offsets.

Clients of Triton get RapidJSON's messages; the parsers used here have others. Called by :mod:`conch.wire.json.text`
only for refused documents; does no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import isinf
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
