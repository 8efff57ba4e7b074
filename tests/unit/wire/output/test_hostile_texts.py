"""Long texts that repeat the beginnings of calls, marks or headers: the work of a parser grows with their length."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from conch.wire.output.events import OutputParser
from conch.wire.output.formats import CALLS, OutputFormat
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools

TOOLS = Tools(b"", "auto", parameters={"f": {"a": ["string"], "b": ["integer"]}})
#: A format, the beginning of a text, and what it repeats.
TEXTS = (
    ("hermes", "", "<tool_call>{"),
    ("hermes", "", '<tool_call>{"a":"'),
    ("hermes", "<tool_call>{", " "),
    ("hermes", '<tool_call>{"name": "', "a"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {', "a"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ("hermes", "", "<tool_call>"),
    ("hermes", "Well.", "\n"),
    ("hermes", "<think>Well.", "\n"),
    ("qwen3-coder", "<tool_call><function=f><parameter=b>", "1"),
    ("qwen3-coder", "<tool_call><function=f>", "<parameter="),
    ("glm", "<tool_call>f<arg_key>", "a"),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]f{}", "{"),
    ("lfm2", "", '<|tool_call_start|>{"a":'),
    ("llama", "<|python_tag|>f(a", " "),
    ("llama", "<|python_tag|>f(", "1, "),
    ("llama", "[f", " "),
    ("any", "", " "),
    ("any", '{"name"', " "),
    ("phi4", "", '<|tool_call|>{"name": "f", "arguments":'),
    ("cohere", "", '<|START_ACTION|>{"name": "f'),
    ("harmony", "assistant", "a"),
    ("harmony", "", "<|channel|>"),
    ("harmony", "<|channel|>analysis", " to=f"),
    *((name, "", mark) for name, known in CALLS.items() for mark in known.blocks),
)  # fmt: skip


def work(parser: OutputParser, pieces: list[str]) -> int:
    """Return the work of a parser: for each call of a method, the length of the longest text that its object holds."""
    total = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal total
        holder = frame.f_locals.get("self") if event == "call" else None
        if type(holder).__module__.startswith("conch.wire.output"):
            held = (value for value in getattr(holder, "__dict__", {}).values() if type(value) is str)
            total += max(map(len, held), default=0) + 1

    sys.setprofile(count)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return total


@pytest.mark.parametrize(("name", "begin", "unit"), TEXTS)
@pytest.mark.parametrize("size", [8, 5_000])
def test_work_grows_with_the_length_of_the_text(name: str, begin: str, unit: str, size: int) -> None:
    output_format = OutputFormat(name, ("<think>", "</think>")).dumps()
    done = []
    for length in (1_500, 3_000):
        text = begin + unit * (length // len(unit))
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        done.append(work(parser_for(TOOLS, output_format), pieces))
    assert done[1] < 2.6 * done[0], done
