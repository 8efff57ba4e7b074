"""The events of a generated text, and the interface of the parsers that produce them.

A parser gets the text of one choice in parts of any size. Its events, in their order, are the message: the text of the
answer and of the reasoning, and tool calls, whose arguments arrive as they are written. The ``ArgumentsDelta`` of a
call add up to a JSON object, also if the generation ends within the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of tool call number ``index`` (from 0): a new ``id`` and the name of the function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A part of the arguments (JSON) of tool call number ``index``."""

    index: int
    text: str


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Converts the text of a choice to events."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Add a part of the text; return the events that are certain now."""

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events; called once, at the end of the text."""


class TextParser:
    """Parses a text that is the answer."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []
