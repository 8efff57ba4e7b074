"""Reads arguments that a model writes as XML-like parameters, and returns them as JSON.

Sources: the chat templates of Qwen3-Coder, GLM-4.5 and MiniMax-M2. A value is typed by the tool's schema: a text is
passed on as it is written, any other value when it has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from conch.wire.output.values import ValueReader, partial, quoted, word

_NUMBER: Final = re.compile(r"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
#: The maximum number of characters in front of a parameter.
_MOST: Final = 400


@dataclass(frozen=True, slots=True)
class ParameterNotation:
    """``open`` matches the text before a value, with a group ``key``, ``close`` ends it, ``end`` ends the arguments.

    ``lines``: a line break after ``open`` and one before ``close`` are not part of the value.
    """

    open: re.Pattern[str]
    close: str
    end: str
    lines: bool = False


class ParameterReader:
    """Reads parameters up to ``notation.end``; ``types`` has the types of each parameter's schema.

    ``rest`` is the text from ``end`` on, None until it arrives.
    """

    def __init__(self, notation: ParameterNotation, types: Mapping[str, Sequence[str]]) -> None:
        self.rest: str | None = None
        self._notation = notation
        self._types = types
        self._pending = ""
        self._count = 0
        self._opened = False
        #: The types of the current value; None between values.
        self._value: Sequence[str] | None = None
        self._key = ""
        self._streams = False
        #: The parts of a value that is passed on when it has ended.
        self._parts: list[str] = []

    def feed(self, text: str) -> str:
        """Add text; return the JSON that is certain."""
        if self.rest is not None:
            return ""
        self._pending += text
        out: list[str] = []
        if not self._opened:
            self._opened = True
            out.append("{")
        while self.rest is None and (self._between(out) if self._value is None else self._read(out)):
            pass
        return "".join(out)

    def finish(self) -> str:
        """Return the JSON that completes the arguments, whose text has ended; only an unfinished text is kept."""
        if self.rest is not None:
            return ""
        self.rest = ""
        end = "}" if self._opened else "{}"
        if self._value is not None and self._streams:
            return self._started() + quoted(self._pending) + '"' + end
        return end

    def _between(self, out: list[str]) -> bool:
        notation = self._notation
        match, end = notation.open.search(self._pending), self._pending.find(notation.end)
        if match is not None and not 0 <= end < match.end() - len(notation.end):
            self._key = match["key"]
            self._value = self._types.get(self._key, ())
            self._streams = tuple(self._value) == ("string",)
            self._pending = self._pending[match.end() :]
            self._lead = notation.lines
            self._begun = False
            return True
        if end >= 0:
            out.append("}")
            self.rest, self._pending = self._pending[end:], ""
            return False
        self._pending = self._pending[-_MOST:]
        return False

    def _read(self, out: list[str]) -> bool:
        notation = self._notation
        if self._lead and self._pending:
            self._lead = False
            self._pending = self._pending.removeprefix("\n")
        end = self._pending.find(notation.close)
        if end < 0:
            sure = len(self._pending) - partial(self._pending, (notation.close, "\n" + notation.close))
            text, self._pending = self._pending[:sure], self._pending[sure:]
            if not self._streams:
                self._parts.append(text)
            elif text:
                out.append(self._started() + quoted(text))
            return False
        text, self._pending = self._pending[:end], self._pending[end + len(notation.close) :]
        if notation.lines:
            text = text.removesuffix("\n")
        if self._streams:
            out.append(self._started() + quoted(text) + '"')
        else:
            out.append(self._name() + typed("".join(self._parts) + text, self._value or ()))
            self._parts.clear()
        self._value = None
        return True

    def _started(self) -> str:
        """Return the key and the quote before a text, the first time."""
        begun, self._begun = self._begun, True
        return "" if begun else self._name() + '"'

    def _name(self) -> str:
        separator = "," if self._count else ""
        self._count += 1
        return f'{separator}"{quoted(self._key)}":'


def typed(text: str, types: Sequence[str]) -> str:
    """Return the JSON of a value with one of ``types`` (of JSON Schema); without types, its type is guessed."""
    bare = text.strip()
    for kind in types or ("null", "boolean", "number", "object", "array"):
        match kind:
            case "integer" | "number" if _NUMBER.fullmatch(bare) and isfinite(number := float(bare)):
                if kind == "integer" and number.is_integer():
                    return str(int(number) if any(mark in bare for mark in ".eE") else int(bare))
                return bare if word(bare) == bare else json.dumps(number)
            case "boolean" if bare.lower() in ("true", "false"):
                return bare.lower()
            case "null" if bare.lower() in ("null", "none"):
                return "null"
            case "object" | "array" if bare[:1] == ("{" if kind == "object" else "["):
                reader = ValueReader()
                value = reader.feed(bare)
                if reader.rest is not None and not reader.rest.strip():
                    return value
    return f'"{quoted(text)}"'
