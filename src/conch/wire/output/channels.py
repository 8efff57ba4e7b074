"""Parses harmony, the output format of GPT-OSS: messages in channels.

A message is ``<|start|>assistant<|channel|>CHANNEL<|message|>TEXT`` up to ``<|end|>``, ``<|call|>`` or ``<|return|>``;
the prompt has the first ``<|start|>assistant``. The channel ``analysis`` is the reasoning, a message with a recipient
(``to=functions.NAME``) is a call, and the others are the answer. Source: OpenAI's description of harmony.
"""

from __future__ import annotations

import re
from typing import Final

from conch.wire.output.calls import Calls, ObjectReader
from conch.wire.output.events import OutputEvent, ReasoningDelta, TextDelta
from conch.wire.output.tools import Tools
from conch.wire.output.values import partial, pieces

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
#: Marks that end a message or a header, and all marks that end a message.
_LAST: Final = ("<|end|>", "<|call|>", "<|return|>")
_ENDS: Final = (*_LAST, _START, _CHANNEL)
#: All marks; the others are left out of a message.
_MARKS: Final = (*_ENDS, _MESSAGE, "<|constrain|>")
_END: Final = re.compile("|".join(map(re.escape, _MARKS)))
_HEADER_END: Final = re.compile("|".join(map(re.escape, (_MESSAGE, *_LAST))))
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
#: Beginnings of a header, in front of its first mark.
_HEADERS: Final = ("assistant", "to=", _CHANNEL, _START, _MESSAGE)
#: The maximum number of characters of a header; a longer text is a message.
_LONGEST_HEADER: Final = 400
#: The parts of a header that are not text: marks, the last of which may be cut off.
_PARTS: Final = re.compile(r"<\|(?:start|channel|constrain)\|>\s*\w*|<\|message\|>|\bto=[^\s<]+|<(?:\|\w*\|?)?\Z")


class ChannelParser:
    """Parses the messages of a choice; text without a header is the answer.

    Messages of the same kind are separated by an empty line.
    """

    def __init__(self, tools: Tools) -> None:
        self._calls = Calls(tools)
        self._offered = tools.mode == "auto"
        self._pending = ""
        #: The type of the current message's events; None in a header.
        self._event: type[TextDelta] | type[ReasoningDelta] | None = None
        self._arguments: ObjectReader | None = None
        #: The kinds of messages that have text, and whether the current one has.
        self._written: set[type[TextDelta] | type[ReasoningDelta]] = set()
        self._begun = False

    def feed(self, text: str) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in pieces(text):
            self._pending += piece
            while self._read_header(events) if self._event is None else self._read_message(events):
                pass
        return events

    def finish(self) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if self._event is None:
            self._begin_message(len(self._pending))
        self._pass_on(len(self._pending), events)
        self._end_message(events)
        return events

    def _read_header(self, events: list[OutputEvent]) -> bool:
        """Read up to the text of a message; False if more text is needed."""
        self._pending = self._pending.lstrip()
        begins = any(self._pending.startswith(start) for start in _HEADERS)
        end = _HEADER_END.search(self._pending, 0, _LONGEST_HEADER) if begins else None
        if end is not None and end.group() == _MESSAGE:
            header, self._pending = self._pending[: end.start()], self._pending[end.end() :]
            recipient = _RECIPIENT.search(header)
            self._event = _kind(header)
            if recipient is not None and self._offered:
                self._arguments = ObjectReader()
                events += self._calls.begin(recipient[1].removeprefix("functions."))
            return True
        if end is not None:
            self._begin_message(end.start())
            return True
        if begins and len(self._pending) >= _LONGEST_HEADER:
            self._begin_message(_LONGEST_HEADER - partial(self._pending[:_LONGEST_HEADER], _MARKS))
            return True
        if begins or any(start.startswith(self._pending) for start in _HEADERS):
            return False
        self._event = TextDelta
        return True

    def _begin_message(self, end: int) -> None:
        """Make the first ``end`` characters, a header that no message follows, the beginning of a message."""
        header = self._pending[:end]
        self._event = _kind(header)
        if any(mark in header for mark in _MARKS):
            self._pending = _PARTS.sub("", header).lstrip() + self._pending[end:]

    def _read_message(self, events: list[OutputEvent]) -> bool:
        """Read the text of a message; False if more text is needed."""
        end = _END.search(self._pending)
        if end is None:
            self._pass_on(len(self._pending) - partial(self._pending, _MARKS), events)
            return False
        self._pass_on(end.start(), events)
        mark = end.group()
        self._pending = self._pending if mark in (_START, _CHANNEL) else self._pending[len(mark) :]
        if mark in _ENDS:
            self._end_message(events)
        return True

    def _pass_on(self, end: int, events: list[OutputEvent]) -> None:
        """Pass on the first ``end`` characters."""
        text, self._pending = self._pending[:end], self._pending[end:]
        if self._arguments is not None:
            events += self._calls.arguments(self._arguments.feed(text))
        elif text and self._event is not None:
            separator = "\n\n" if not self._begun and self._event in self._written else ""
            events.append(self._event(separator + text))
            self._begun = True
            self._written.add(self._event)

    def _end_message(self, events: list[OutputEvent]) -> None:
        if self._arguments is not None and self._arguments.rest is None:
            events += self._calls.arguments(self._arguments.finish() or "{}")
        self._event, self._arguments, self._begun = None, None, False


def _kind(header: str) -> type[TextDelta] | type[ReasoningDelta]:
    """Return the type of the events for the message after ``header``."""
    channel = _NAME.search(header)
    return ReasoningDelta if channel is not None and channel[1] == "analysis" else TextDelta
