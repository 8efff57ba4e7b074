"""Reads blocks of tool calls as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

from conch.wire.output.events import ArgumentsDelta, OutputEvent, ToolCallStart
from conch.wire.output.formats import Block, Header
from conch.wire.output.parameters import ParameterNotation, ParameterReader
from conch.wire.output.tools import Tools
from conch.wire.output.values import ValueReader, loads

#: The maximum number of characters in front of the arguments of a call that are passed on as they are written, and of
#: a header; a longer text is not a header.
_MOST: Final = 400
#: The maximum number of characters of an object around a call; a longer object is not a call.
_LONGEST_OBJECT: Final = 100_000
#: The beginning of a JSON object that is a call, up to its arguments.
_OBJECT: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'(?:"(?:id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\\ud800-\udfff]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
#: The beginning of a call that the end of the text has cut.
_CUT: Final = re.compile(r'\{\s*"(?:type|function|id|tool_call_id|name|tool_name|arguments|parameters)"')


class ArgumentsReader(Protocol):
    """Reads the arguments of a call: ``ValueReader`` or ``ParameterReader``."""

    rest: str | None

    def feed(self, text: str) -> str: ...

    def finish(self) -> str: ...


class Calls:
    """Numbers the calls of a choice; without parallel calls, only the first one has events."""

    def __init__(self, tools: Tools) -> None:
        self.parameters = tools.parameters
        self._limit = 1 if tools.single else None
        self._count = 0

    def begin(self, name: str, id: str = "") -> list[OutputEvent]:
        """Return the event for the beginning of the next call."""
        self._count += 1
        if not self._current:
            return []
        return [ToolCallStart(self._count - 1, id or f"call_{uuid4().hex}", name)]

    def arguments(self, text: str) -> list[OutputEvent]:
        """Return the event for a part of the arguments of the current call."""
        return [ArgumentsDelta(self._count - 1, text)] if text and self._current else []

    @property
    def any(self) -> bool:
        """Whether a call has begun."""
        return self._count > 0

    @property
    def _current(self) -> bool:
        return self._limit is None or self._count <= self._limit


class BlockReader:
    """Reads the calls of a block.

    The state is ``reading`` until the block has ``ended``, or has ``failed`` because it has no call. ``text`` is then
    the text of a block that has failed, and ``rest`` the text to read next. Only calls of ``known`` tools count, None:
    any call.
    """

    def __init__(self, block: Block, calls: Calls, known: Collection[str] | None = None) -> None:
        self.state: Literal["reading", "ended", "failed"] = "reading"
        self.text = ""
        self.rest = ""
        self._block = block
        self._calls = calls
        self._known = known
        self._pending = ""
        #: All text, until the first call begins.
        self._all: list[str] | None = []
        self._arguments: ArgumentsReader | None = None
        #: The object around the arguments; until its call begins, the beginning of its text, its length and its JSON.
        self._object: ValueReader | None = None
        self._source = ""
        self._length = 0
        self._json: list[str] = []

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that are certain."""
        if self._all is not None:
            self._all.append(text)
        self._pending += text
        events: list[OutputEvent] = []
        while self.state == "reading" and self._step(events):
            pass
        return events

    def begin(self, mark: str) -> None:
        """Add the mark of the block as the beginning of its first header; ``text`` and ``rest`` do not include it."""
        self._pending = mark

    def finish(self) -> list[OutputEvent]:
        """Return the events at the end of the text, which ends the block."""
        events: list[OutputEvent] = []
        if self._arguments is not None and self._arguments.rest is None:
            events = self._calls.arguments(self._arguments.finish() or "{}")
        if self.state == "reading":
            unread = "" if self._object is not None or self._block.close.startswith(self._pending) else self._pending
            if self._known is None and _CUT.match(self._source):
                self._all = None
            self._end(unread)
        return events

    def _end(self, rest: str) -> None:
        """End the block; it has failed if no call has begun."""
        self.state, self.rest = "ended", rest
        if self._all is not None:
            text = "".join(self._all)
            end = max(len(text) - len(rest), 0)
            self.state, self.text, self.rest = "failed", text[:end], text[end:]

    def _step(self, events: list[OutputEvent]) -> bool:
        if self._object is not None:
            return self._read_object(events)
        if self._arguments is not None:
            return self._read_arguments(events)
        block = self._block
        between = block.between.match(self._pending)
        pending = self._pending = self._pending[between.end() :] if between is not None else self._pending
        if not pending:
            return False
        if block.close and pending.startswith(block.close):
            self._end(pending[len(block.close) :])
            return False
        if block.objects and pending[0] == "{":
            self._object = ValueReader()
            self._source, self._length, self._json = "", 0, []
            return True
        close = pending.find(block.close, 0, _MOST) if block.close else -1
        most = close + len(block.close) if close >= 0 else _MOST
        for header in block.headers:
            match = header.pattern.match(pending, 0, most)
            if match is not None:
                return self._begin(header, match, events)
        if block.close and block.close.startswith(pending):
            return False
        if not block.headers or len(pending) >= _MOST or close >= 0:
            self._end(pending)
        return False

    def _begin(self, header: Header, match: re.Match[str], events: list[OutputEvent]) -> bool:
        name = match["name"].strip()
        if self._known is not None and name not in self._known:
            self._end(self._pending)
            return False
        types = self._calls.parameters.get(name, {})
        match header.arguments:
            case "python":
                self._arguments = ValueReader(arguments=True, names=list(types), marks=self._block.quotes)
            case "value":
                self._arguments = ObjectReader(self._block.quotes)
            case ParameterNotation() as notation:
                self._arguments = ParameterReader(notation, types)
        self._all = None
        self._pending = self._pending[match.end() :]
        events += self._calls.begin(name, match.groupdict().get("id") or "")
        return True

    def _read_arguments(self, events: list[OutputEvent]) -> bool:
        reader = self._arguments
        assert reader is not None
        events += self._calls.arguments(reader.feed(self._pending))
        if reader.rest is None:
            self._pending = ""
            return False
        self._pending, self._arguments = reader.rest, None
        return True

    def _read_object(self, events: list[OutputEvent]) -> bool:
        """Read an object with a name and arguments; the arguments are read twice, alone and in it."""
        around = self._object
        assert around is not None
        text, self._pending = self._pending, ""
        if self._arguments is not None:
            around.feed(text)
            self._feed_arguments(text, events)
        else:
            text, self._pending = text[: _LONGEST_OBJECT - self._length], text[_LONGEST_OBJECT - self._length :]
            self._length += len(text)
            self._json.append(around.feed(text))
            if len(self._source) < _MOST:
                self._source += text
                match = _OBJECT.match(self._source, 0, _MOST)
                if match is not None and (self._known is None or match["name"] in self._known):
                    self._all = None
                    events += self._calls.begin(match["name"])
                    self._arguments = ValueReader()
                    self._feed_arguments(self._source[match.end() :], events)
                    self._source = ""
        if around.rest is None and (self._arguments is not None or self._length < _LONGEST_OBJECT):
            return False
        self._pending, self._object = (around.rest or "") + self._pending, None
        if self._arguments is not None:
            self._arguments = None
            return True
        self._source = ""
        call = self._call(loads("".join(self._json))) if around.rest is not None else None
        if call is not None:
            self._all = None
            events += self._calls.begin(call[0])
            events += self._calls.arguments(call[1])
        elif self._all is not None:
            self._end(self._pending)
            return False
        return True

    def _feed_arguments(self, text: str, events: list[OutputEvent]) -> None:
        if self._arguments is not None and self._arguments.rest is None:
            events += self._calls.arguments(self._arguments.feed(text))

    def _call(self, value: Any) -> tuple[str, str] | None:
        """Return the name and the arguments of a call in another form; None if ``value`` is not a call."""
        if type(value) is not dict:
            return None
        if type(value.get("function")) is dict:
            value = value["function"]
        name = value.get("name", value.get("tool_name"))
        member = next((member for member in ("arguments", "parameters") if member in value), None)
        if type(name) is not str or not name or "\ufffd" in name:
            return None
        if self._known is not None and (name not in self._known or member is None):
            return None
        arguments = value[member] if member is not None else None
        if type(arguments) is dict:
            return name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return name, json_object(arguments if type(arguments) is str else "")


class ObjectReader(ValueReader):
    """Reads arguments that are an object; other text, which follows a call without arguments, is not read."""

    def __init__(self, quotes: tuple[str, ...] = ()) -> None:
        super().__init__(marks=quotes)
        self._space = ""
        self._begun = False

    def feed(self, text: str) -> str:
        if self._begun or self.rest is not None:
            return super().feed(text)
        self._space += text
        bare = self._space.lstrip()
        if not bare:
            return ""
        self._begun = True
        if bare[0] == "{":
            return super().feed(bare)
        self.rest = bare
        return "{}"


def json_object(text: str) -> str:
    """Return arguments in a text as a JSON object; ``{}`` if it does not begin with one."""
    reader = ValueReader()
    bare = text.lstrip()
    return reader.feed(bare) + reader.finish() if bare[:1] == "{" else "{}"
