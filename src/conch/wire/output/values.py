"""Reads values that a model writes, in parts of any size, and returns them as JSON.

The notation may be JSON, Python literals, or JSON with other quotes, as in Gemma's calls. The parts add up to valid
JSON for any text: a value that is not finished is left out if it is a number or a word, and closed if it is a text, a
list or an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, count
from math import isfinite
from typing import Any, Final

#: A part of a text that JSON needs no escape for.
_PLAIN: Final = re.compile(r"[^\"\\\x00-\x1f\ud800-\udfff]+")
_SPACE: Final = re.compile(r"\s+")
#: The maximum number of characters of a number, or of a word that is not passed on in parts.
_LONGEST_WORD: Final = 400
#: The maximum number of characters that are read at once: a step copies the rest of them.
_LONGEST_PIECE: Final = 500
#: The end of a word or number.
_WORD_END: Final = re.compile(r"[\s,:=()\[\]{}]")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
#: Words of JSON and Python, and their JSON.
_WORDS: Final = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
    "NaN": "null", "Infinity": "null", "-Infinity": "null", "undefined": "null",
}  # fmt: skip
_ESCAPED: Final = frozenset('"\\/bfnrt')
#: Escapes of Python by a code point: letter and number of digits.
_DIGITS: Final = {"u": 4, "x": 2, "U": 8}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_CLOSERS: Final = {"{": "}", "[": "]"}


def quoted(text: str) -> str:
    """Return ``text`` as the inside of a JSON text."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]


def word(text: str) -> str:
    """Return the JSON of a number or a word without quotes; another word, or too large a number, becomes a text."""
    if _NUMBER.fullmatch(text) and isfinite(float(text)):
        return text
    return _WORDS.get(text) or f'"{quoted(text)}"'


def pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces, so that the time to read it grows with its length."""
    return (text[start : start + _LONGEST_PIECE] for start in range(0, len(text), _LONGEST_PIECE))


class ValueReader:
    """Reads one value.

    With ``arguments``, it reads the arguments of a call in Python's notation up to the closing parenthesis, as an
    object; ``names`` are the names of arguments without a keyword, or with a repeated one. ``marks`` are further
    quotes: the same text begins and ends a text without escapes. ``rest`` is the text after the value, None until it
    ends.
    """

    def __init__(self, *, arguments: bool = False, names: Sequence[str] = (), marks: Sequence[str] = ()) -> None:
        self.rest: str | None = None
        self._pending = ""
        self._out: list[str] = []
        #: JSON that is returned when the next value begins: a separator and a key.
        self._held = ""
        self._stack: list[str] = []
        self._state = "value"
        self._quote = ""
        self._names = chain(names, (f"argument{index}" for index in count()))
        self._used: set[str] = set()
        self._marks = tuple(marks)
        self._keywords = arguments
        self._key: list[str] | None = None
        if arguments:
            self._out.append("{")
            self._stack.append("{")
            self._state = "key"

    def feed(self, text: str) -> str:
        """Add text; return the JSON that is certain."""
        if self.rest is not None:
            return ""
        read = 0
        for piece in pieces(text):
            self._pending += piece
            while self.rest is None and self._step():
                pass
            read += len(piece)
            if self.rest is not None:
                self.rest += text[read:]
                break
        json_text = "".join(self._out)
        self._out.clear()
        return json_text

    def finish(self) -> str:
        """Return the JSON that completes the value, whose text has ended; empty if no value has begun."""
        if self.rest is not None:
            return ""
        self.rest = ""
        if self._state == "word" and not self._stack:
            return word(self._pending)
        begun = "".join(self._out) + ('"' if self._state == "text" and self._key is None else "")
        return begun + "".join(_CLOSERS[opened] for opened in reversed(self._stack))

    def _step(self) -> bool:
        """Read the next element; False if more text is needed."""
        if self._state == "text":
            return self._text()
        if self._state == "word":
            return self._word()
        if (space := _SPACE.match(self._pending)) is not None:
            self._pending = self._pending[space.end() :]
        if not self._pending:
            return False
        match self._state:
            case "value":
                return self._value()
            case "key":
                return self._begin_key()
            case "colon":
                if self._pending[0] in ":=":
                    self._pending = self._pending[1:]
                self._state = "value"
            case "comma":
                self._separate()
        return True

    def _value(self) -> bool:
        first = self._pending[0]
        if first in "}])" and self._stack:
            self._close()
        elif first in ",;:":  # a key has no value, or a value is missing in a list
            if first != ":" and self._stack:
                self._held = self._held[:1].strip('"')
                self._state = "key" if self._stack[-1] == "{" else "value"
            self._pending = self._pending[1:]
        elif first in "{[(":
            opened = "[" if first == "(" else first
            self._emit(opened)
            self._stack.append(opened)
            self._state = "key" if first == "{" else "value"
            self._pending = self._pending[1:]
        elif not self._open_quote():
            return False
        return True

    def _open_quote(self) -> bool:
        """Begin a text, or a word; False if that is not certain yet."""
        quote = next((mark for mark in ('"', "'", *self._marks) if self._pending.startswith(mark)), "")
        if not quote and any(mark.startswith(self._pending) for mark in self._marks):
            return False
        if quote:
            self._pending = self._pending[len(quote) :]
            self._begin_text(quote)
        else:
            self._state = "word"
        return True

    def _begin_text(self, quote: str) -> None:
        """Begin a text that ``quote`` ends, or that ends as a word does if it is empty."""
        self._quote = quote
        self._state = "text"
        if self._key is None:
            self._emit('"')

    def _begin_key(self) -> bool:
        first = self._pending[0]
        if first == ",":
            self._pending = self._pending[1:]
            return True
        if first in "}])":
            self._close()
            return True
        if self._keywords and len(self._stack) == 1 and (first in "\"'{[(-0123456789"):
            self._name_argument()
            return True
        self._key = []
        if self._open_quote():
            return True
        self._key = None
        return False

    def _name_argument(self) -> None:
        """Begin the value of an argument without a keyword."""
        name = next(name for name in self._names if name not in self._used)
        self._used.add(name)
        self._held += f'"{quoted(name)}":'
        self._state = "value"

    def _end_key(self) -> None:
        key, self._key = "".join(self._key or ()), None
        if self._keywords and len(self._stack) == 1:
            name = json.loads(f'"{key}"')
            if name in self._used:
                self._name_argument()
                self._state = "colon"
                return
            self._used.add(name)
        self._held += f'"{key}":'
        self._state = "colon"

    def _separate(self) -> None:
        first = self._pending[0]
        if first in "}])":
            self._close()
            return
        if first in ",;":
            self._pending = self._pending[1:]
        self._held = ","
        self._state = "key" if self._stack[-1] == "{" else "value"

    def _close(self) -> None:
        """End the innermost object or list, without a separator that has no value after it."""
        self._held = ""
        self._pending = self._pending[1:]
        self._out.append(_CLOSERS[self._stack.pop()])
        self._end_value()

    def _emit(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _end_value(self) -> None:
        if self._stack:
            self._state = "comma"
        else:
            self.rest, self._pending = self._pending, ""

    def _word(self) -> bool:
        end = _WORD_END.search(self._pending, 0, _LONGEST_WORD)
        if end is None:
            if len(self._pending) < _LONGEST_WORD:
                return False
            self._begin_text("")
            return True
        text, after = self._pending[: end.start()], self._pending[end.start() :]
        named = self._key is not None and self._keywords and len(self._stack) == 1
        if named and not after.strip():
            self._pending = text + " "
            return False  # "=" or ":" makes the word a name, anything else a value
        self._pending = after
        if self._key is None:
            if not text:  # a character that begins no value
                self._pending = self._pending[1:]
                self._state = "value"
                return True
            self._emit(word(text))
            self._end_value()
            return True
        if not text:
            self._pending = self._pending[1:]
        if named and after.lstrip()[0] in ",)":
            self._key = None
            self._name_argument()
            self._pending = text + self._pending
            return True
        self._key.append(quoted(text))
        self._end_key()
        return True

    def _text(self) -> bool:
        """Read a part of a text: up to its end, an escape, or the end of what has arrived."""
        sink = self._out if self._key is None else self._key
        if not self._quote:
            match = _WORD_END.search(self._pending)
            end = match.start() if match is not None else len(self._pending)
            sink.append(quoted(self._pending[:end]))
            self._pending = self._pending[end:]
            if match is not None:
                self._end_text()
            return match is not None
        if len(self._quote) > 1:
            end = self._pending.find(self._quote)
            if end < 0:
                sure = len(self._pending) - partial(self._pending, (self._quote,))
                sink.append(quoted(self._pending[:sure]))
                self._pending = self._pending[sure:]
                return False
            sink.append(quoted(self._pending[:end]))
            self._pending = self._pending[end + len(self._quote) :]
            self._end_text()
            return True
        pending = self._pending
        at = 0
        while at < len(pending):
            character = pending[at]
            if character == self._quote:
                self._pending = pending[at + 1 :]
                self._end_text()
                return True
            if character == "\\":
                escape = self._escape(pending, at)
                if escape is None:
                    break
                json_text, at = escape
                sink.append(json_text)
                continue
            plain = _PLAIN.match(pending, at)
            if plain is None:
                sink.append(quoted(character))
                at += 1
                continue
            end = plain.end()
            if self._quote == "'":
                quote = pending.find("'", at, end)
                end = quote if quote >= 0 else end
            sink.append(pending[at:end])
            at = end
        self._pending = pending[at:]
        return False

    def _end_text(self) -> None:
        if self._key is not None:
            self._end_key()
            return
        self._out.append('"')
        self._end_value()

    def _escape(self, text: str, at: int) -> tuple[str, int] | None:
        """Return the JSON of the escape at ``at``, and the index after it; None if it is not complete."""
        if at + 1 == len(text):
            return None
        kind = text[at + 1]
        if kind in _ESCAPED:
            return text[at : at + 2], at + 2
        count = _DIGITS.get(kind, 0)
        if not count:
            return ("" if kind == "\n" else quoted(kind) if kind == "'" else "\\\\" + quoted(kind)), at + 2
        digits = text[at + 2 : at + 2 + count]
        if not _HEX.issuperset(digits):
            return "\\\\", at + 1
        if len(digits) < count:
            return None
        code, end = int(digits, 16), at + 2 + count
        if kind == "u" and 0xD800 <= code < 0xDC00:  # the first half of a character
            second = text[end : end + 6]
            if "\\u".startswith(second[:2]) and len(second) < 6 and _HEX.issuperset(second[2:]):
                return None
            if second.startswith("\\u") and _HEX.issuperset(second[2:]) and 0xDC00 <= int(second[2:], 16) < 0xE000:
                return text[at : end + 6], end + 6
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            return "\ufffd", end
        return (text[at:end] if kind == "u" else quoted(chr(code))), end


def partial(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that may begin one of ``marks``."""
    longest = 0
    for mark in marks:
        start = max(len(text) - len(mark) + 1, 0)
        while (start := text.find(mark[0], start)) >= 0:
            if mark.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest


def loads(text: str) -> Any:
    """Return the value of JSON that a reader returned; None if it is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
