"""Adds the events of a parser up to a message."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from conch.wire.output.events import ArgumentsDelta, OutputParser, ReasoningDelta, TextDelta, ToolCallStart


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def read(parser: OutputParser, *pieces: str) -> Message:
    """Return the message for a text in pieces; the arguments of calls must be JSON, and their parts not empty."""
    message = Message()
    calls: list[list[str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case TextDelta(text):
                message.content += text
            case ReasoningDelta(text):
                message.reasoning += text
            case ToolCallStart(index, id, name):
                assert index == len(calls)
                assert id
                calls.append([name, ""])
            case ArgumentsDelta(index, text):
                assert text
                calls[index][1] += text
    message.calls = [(name, json.loads(arguments)) for name, arguments in calls]
    return message
