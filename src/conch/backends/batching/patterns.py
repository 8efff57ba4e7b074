"""Translates the regular expressions of JSON schemas to llguidance's syntax, which is that of Rust's ``regex``.

JSON Schema's patterns have the syntax of ECMAScript, but many validators, such as Python's, use another. Where their
character classes differ (``\\w`` with or without ``é``, ``.`` with or without a carriage return), a translation matches
only the texts that both accept.
"""

from __future__ import annotations

import re
from typing import Final

from conch.core.errors import invalid

#: Classes by letter: the characters that are in the class for every validator, and those that are in it for any.
_NARROW: Final = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": r"\t\n\x0b\f\r\x20",
    "D": r"[^\p{Nd}]",
    "W": r"[^\p{L}\p{N}\p{M}\p{Pc}]",
    "S": r"[^\s\x1c-\x1f\x{feff}]",
}
_WIDE: Final = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{N}\p{M}\p{Pc}",
    "s": r"\s\x1c-\x1f\x{feff}",
    "D": "[^0-9]",
    "W": "[^A-Za-z0-9_]",
    "S": r"[^\t\n\x0b\f\r\x20]",
}
#: A limit of every class: a class with all control characters would also match quotes and backslashes.
_LIMIT: Final = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_DOT: Final = r"[^\n\r\x{2028}\x{2029}\x00-\x07\x0b\x0e-\x1f\x7f]"
_CONTROLS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
#: An escape, with a property of Unicode or the code of a character, or a single character.
_PIECE: Final = re.compile(
    r"\\(?:(?P<property>[pP]\{[^}]*\})|u(?P<pair>[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|"
    r"u\{(?P<long>[0-9a-fA-F]{1,6})\}|u(?P<code>[0-9a-fA-F]{4})|x(?P<byte>[0-9a-fA-F]{2})|c(?P<control>[A-Za-z])|"
    r"(?P<escaped>.))|(?P<plain>.)",
    re.DOTALL,
)
#: Control characters that JSON has an escape for. Others are not written, because their escapes (``\\u0001``) would
#: also allow a second spelling of every other character.
_WRITTEN: Final = frozenset("\b\t\n\f\r")


def is_writable(character: str) -> bool:
    """Whether structured output can contain the character."""
    return (character >= " " and character != "\x7f") or character in _WRITTEN


def translate(pattern: str) -> str:
    """Translate a pattern. Raises INVALID_ARG for a feature that llguidance or the other validators do not have."""
    pieces = list(_PIECE.finditer(pattern))
    if sum(len(piece[0]) for piece in pieces) != len(pattern):
        raise invalid(f"the pattern '{pattern[:80]}' ends within an escape")
    result: list[str] = []
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        index += 1
        letter = piece["escaped"]
        if piece["plain"] == "[":
            text, index = _class(pieces, index, pattern)
            result.append(text)
        elif piece["plain"] == ".":
            result.append(_DOT)
        elif piece["plain"] is not None:
            result.append(_checked(piece["plain"], pattern) if not is_writable(piece["plain"]) else piece["plain"])
        elif piece["property"]:
            result.append(f"[{piece[0]}{_LIMIT}]")
        elif letter and letter in _NARROW:
            result.append(f"[{_NARROW[letter]}{_LIMIT}]")
        elif letter == "b" or (letter and letter.isalnum() and letter not in _CONTROLS):
            raise invalid(f"the pattern '{pattern[:80]}' has '{piece[0]}', which is not supported")
        else:
            result.append(escaped(_checked(_character(piece), pattern)))
    return "".join(result)


def _class(pieces: list[re.Match[str]], index: int, pattern: str) -> tuple[str, int]:
    """Translate a character class from behind its bracket. Returns it and the index behind its end."""
    negated = index < len(pieces) and pieces[index]["plain"] == "^"
    index += negated
    table = _WIDE if negated else _NARROW
    #: Each item is a character, or the translation of a class.
    items: list[tuple[str, str]] = []
    while index < len(pieces) and pieces[index]["plain"] != "]":
        piece = pieces[index]
        letter = piece["escaped"]
        if piece["property"]:
            items.append(("", piece[0]))
        elif letter and letter in table:
            items.append(("", table[letter]))
        elif letter and letter.isalnum() and letter not in _CONTROLS:
            raise invalid(f"the pattern '{pattern[:80]}' has '{piece[0]}', which is not supported")
        elif piece["plain"] == "-":
            items.append(("-", ""))
        else:
            items.append((_character(piece), ""))
        index += 1
    if index == len(pieces):
        raise invalid(f"the pattern '{pattern[:80]}' has a class without an end")
    if not items:
        raise invalid(f"the pattern '{pattern[:80]}' has an empty class, which validators read differently")
    texts: list[str] = []
    position = 0
    while position < len(items):
        character, translated = items[position]
        following = [item[0] for item in items[position + 1 : position + 3]]
        if character and character != "-" and following[:1] == ["-"] and following[1:] and following[1]:
            texts.append(f"{escaped(character)}-{escaped(following[1])}")
            position += 3
        else:
            texts.append(translated or escaped(character))
            position += 1
    characters = "".join(texts)
    return f"[{f'[^{characters}]' if negated else characters}{_LIMIT}]", index + 1


def _character(piece: re.Match[str]) -> str:
    """Return the single character that a part of a pattern represents."""
    if piece["pair"]:
        high, low = (int(code, 16) for code in piece["pair"].lower().split("\\u"))
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    if code := piece["long"] or piece["code"] or piece["byte"]:
        value = int(code, 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise invalid(f"a pattern has '{piece[0]}', which is not a character")
        return chr(value)
    if piece["control"]:
        return chr(ord(piece["control"]) % 32)
    return _CONTROLS.get(piece["escaped"] or "", piece["escaped"] or piece["plain"])


def _checked(character: str, pattern: str) -> str:
    if not is_writable(character):
        raise invalid(f"the pattern '{pattern[:80]}' has a control character, U+{ord(character):04X}")
    return character


def escaped(character: str) -> str:
    """Return the syntax for a literal character, inside or outside of a class."""
    if character.isalnum() or character in " _":
        return character
    return f"\\x{{{ord(character):x}}}"
