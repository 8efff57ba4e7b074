"""Adds the events of a parser up to a message."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
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
    message.calls = [(name, _loads(arguments)) for name, arguments in calls]
    return message


def _loads(text: str) -> Any:
    """Return the value of JSON without numbers that are not finite."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    assert isfinite(float(text)), text
    return float(text)
