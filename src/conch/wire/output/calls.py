"""Parsers of tool calls that are written as JSON.

Formats: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen), ``[TOOL_CALLS]`` with a list or ``name{…}`` (Mistral),
``<|python_tag|>{…}`` and bare ``{"name": …, "parameters": …}`` (Llama 3). Text that only resembles a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

import orjson

from conch.wire.output.events import ArgumentsDelta, OutputEvent, OutputParser, TextDelta, TextParser, ToolCallStart
from conch.wire.output.tools import Tools

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
#: Marks followed only by calls.
_REST: Final = ("[TOOL_CALLS]", "<|python_tag|>")
_MARKS: Final = (_OPEN, *_REST)
_MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))
#: Prefixes of a call without a mark, without white space.
_BARE: Final = (
    '{"name":',
    '[{"name":',
    '{"type":"function",',
    '[{"type":"function",',
    '{"arguments":',
    '{"parameters":',
)
_NAMED: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN: Final = re.compile(rf"(?:[\s;,]|{_MARK.pattern})*")
_SPACE: Final = re.compile(r"\s+")
_decoder: Final = json.JSONDecoder(strict=False)


def parser_for(tools: Tools) -> OutputParser:
    """Return the parser of a conversation with ``tools``."""
    match tools.mode:
        case "auto":
            return CallParser(tools)
        case "required":
            return ListParser()
        case "named":
            return ArgumentsParser(tools.name)
    return TextParser()


def call_events(index: int, name: str, arguments: str) -> list[OutputEvent]:
    """Return the events of a call with a new identifier."""
    start = ToolCallStart(index, f"call_{uuid4().hex}", name)
    return [start, ArgumentsDelta(index, arguments)] if arguments else [start]


class CallParser:
    """Finds marks anywhere in the text, and a call of one of the tools without a mark at its beginning."""

    def __init__(self, tools: Tools) -> None:
        self._names = tools.names
        self._limit = 1 if tools.single else None
        self._pending = ""
        #: White space before a mark, which is content only if no call follows.
        self._space = ""
        self._state = "start"
        self._calls = 0

    def feed(self, text: str) -> list[OutputEvent]:
        self._pending += text
        return list(self._go())

    def finish(self) -> list[OutputEvent]:
        pending, self._pending = self._pending, ""
        calls = None
        if self._state == "hermes":
            calls = _calls_in(pending.removeprefix(_OPEN))
        elif self._state == "rest":
            calls = _calls_in(_MARK.sub("", pending, count=1), named=True)
        elif self._state == "bare":
            calls = _calls_in(pending)
            if calls and not all(name in self._names for name, _ in calls):
                calls = None
        if calls:
            return self._emit(calls)
        # White space between and after calls is not content.
        return [TextDelta(self._space + pending)] if pending and not (self._calls and pending.isspace()) else []

    def _go(self) -> Iterator[OutputEvent]:
        while True:
            before = (self._state, len(self._pending))
            match self._state:
                case "start":
                    self._begin()
                case "text":
                    yield from self._text()
                case "hermes":
                    yield from self._hermes()
            if (self._state, len(self._pending)) == before:
                return

    def _begin(self) -> None:
        """Choose between text and a call without a mark once enough text has arrived."""
        compact = _SPACE.sub("", self._pending[:200])
        if not compact:
            return
        if compact.startswith(_BARE):
            self._state = "bare"
        elif not any(start.startswith(compact) for start in _BARE):
            self._state = "text"

    def _text(self) -> Iterator[OutputEvent]:
        match = _MARK.search(self._pending)
        if match is not None:
            content, self._pending = self._pending[: match.start()], self._pending[match.start() :]
            self._state = "hermes" if match.group() == _OPEN else "rest"
            shown = content.rstrip()
            self._space = content[len(shown) :]
            if shown:
                yield TextDelta(shown)
            return
        sure = len(self._pending) - _partial_mark(self._pending)
        content = self._pending[:sure]
        # White space before a call is not content, and a call may follow.
        sure = len(content.rstrip())
        if sure:
            yield TextDelta(self._pending[:sure])
            self._pending = self._pending[sure:]

    def _hermes(self) -> Iterator[OutputEvent]:
        end = self._pending.find(_CLOSE)
        if end < 0:
            return
        block, self._pending = self._pending[: end + len(_CLOSE)], self._pending[end + len(_CLOSE) :]
        space, self._space = self._space, ""
        self._state = "text"
        calls = _calls_in(block[len(_OPEN) : -len(_CLOSE)])
        if calls:
            yield from self._emit(calls)
        else:
            yield TextDelta(space + block)

    def _emit(self, calls: list[tuple[str, str]]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for name, arguments in calls:
            if self._limit is None or self._calls < self._limit:
                events += call_events(self._calls, name, arguments)
                self._calls += 1
        return events


class ListParser:
    """Parses a text that is a JSON list of calls."""

    def __init__(self) -> None:
        self._pending: list[str] = []

    def feed(self, text: str) -> list[OutputEvent]:
        self._pending.append(text)
        return []

    def finish(self) -> list[OutputEvent]:
        text = "".join(self._pending)
        calls = _calls_in(text)
        if calls:
            return [event for index, call in enumerate(calls) for event in call_events(index, *call)]
        return [TextDelta(text)] if text else []


class ArgumentsParser:
    """Passes on a text that is the arguments of a single function, part by part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> list[OutputEvent]:
        if self._name:
            name, self._name = self._name, ""
            return call_events(0, name, text)
        return [ArgumentsDelta(0, text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return self.feed("") if self._name else []


def _partial_mark(text: str) -> int:
    """Return the number of characters at the end of ``text`` that may begin a mark."""
    for mark in _MARKS:
        start = text.rfind(mark[0], -len(mark) + 1)
        while start >= 0:
            if mark.startswith(text[start:]):
                return len(text) - start
            start = text.find(mark[0], start + 1)
    return 0


def _calls_in(text: str, *, named: bool = False) -> list[tuple[str, str]] | None:
    """Return the name and arguments (JSON) of each call in a text of objects or lists of objects; None otherwise.

    With ``named``, ``name{…}`` is also a call.
    """
    calls: list[tuple[str, str]] = []
    at = 0
    while (at := _between(text, at)) < len(text):
        name = _NAMED.match(text, at) if named else None
        try:
            value, at = _decoder.raw_decode(text, at if name is None else name.end())
        except (ValueError, RecursionError):
            return None
        for item in [{"name": name[1], "arguments": value}] if name is not None else _listed(value):
            call = _call(item)
            if call is None:
                return None
            calls.append(call)
    return calls


def _between(text: str, at: int) -> int:
    """Return the index after white space, separators and marks that may precede a call."""
    match = _BETWEEN.match(text, at)
    return match.end() if match is not None else at


def _listed(value: Any) -> list[Any]:
    return value if type(value) is list else [value]


def _call(value: Any) -> tuple[str, str] | None:
    if type(value) is not dict:
        return None
    if type(value.get("function")) is dict:
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if type(name) is not str or not name or not _is_utf8(name):
        return None
    if type(arguments) is str and _is_utf8(arguments):
        return name, arguments
    try:
        return name, orjson.dumps({} if arguments is None else arguments).decode()
    except orjson.JSONEncodeError:  # numbers beyond 64 bits, lone surrogates
        return name, json.dumps(arguments)


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
