"""Tool calls in texts, whole and in pieces of every size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.wire.output.calls import ArgumentsParser, CallParser, ListParser
from conch.wire.output.events import ArgumentsDelta, OutputParser, TextDelta, ToolCallStart
from conch.wire.output.tools import Tools

NAMES = frozenset({"weather", "time.now"})
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
BONN = ("weather", {"place": "Bonn"})


def auto(*, single: bool = False) -> CallParser:
    return CallParser(Tools(b"", "auto", names=NAMES, single=single))


def read(parser: OutputParser, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls that all events add up to."""
    content, calls = "", []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case TextDelta(text):
                content += text
            case ToolCallStart(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ArgumentsDelta(index, text):
                calls[index][1] += text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (HERMES, "", [BONN]),
        (f"Let me see.\n\n{HERMES}\n{HERMES}\n", "Let me see.", [BONN, BONN]),
        (HERMES.removesuffix("</tool_call>"), "", [BONN]),
        ('{"name": "weather", "parameters": {"place": "Bonn"}}', "", [BONN]),
        ('\n {"type": "function", "name": "weather", "parameters": {"place": "Bonn"}}', "", [BONN]),
        ('{"type": "function", "function": {"name": "weather", "arguments": {"place": "Bonn"}}}', "", [BONN]),
        ('<|python_tag|>{"name": "weather", "parameters": {"place": "Bonn"}}', "", [BONN]),
        (
            '{"name": "weather", "parameters": {"place": "Bonn"}}; {"name": "time.now", "parameters": {}}',
            "",
            [BONN, ("time.now", {})],
        ),
        ('[{"name": "weather", "arguments": {"place": "Bonn"}}]', "", [BONN]),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Bonn"}}]', "", [BONN]),
        ('[TOOL_CALLS]weather{"place": "Bonn"}[TOOL_CALLS]time.now[ARGS]{}', "", [BONN, ("time.now", {})]),
        ('Well. [TOOL_CALLS][{"name": "weather", "arguments": {"place": "Bonn"}}]', "Well.", [BONN]),
        ('<tool_call>{"name": "weather", "arguments": "{\\"place\\": \\"Bonn\\"}"}</tool_call>', "", [BONN]),
        ('<tool_call>{"name": "big", "arguments": {"n": 123456789012345678901}}</tool_call>', "",
         [("big", {"n": 123456789012345678901})]),
    ],
)  # fmt: skip
def test_calls_are_found_however_the_text_is_cut(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    got, found = read(auto(), text)
    assert (got.rstrip(), found) == (content, calls)
    assert read(auto(), *text) == (got, calls)
    for at in range(len(text)):
        assert read(auto(), text[:at], text[at:]) == (got, calls), at


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "Nothing to do.",
        "a < b <tool",
        "<tool_call>nonsense</tool_call>",
        "<tool_call>\n{",
        '{"name": "nobody", "parameters": {}}',
        '{"name": "weather"} is how it is called',
        '{"answer": 42}',
        "[1, 2, 3]",
        "[TOOL_CALLS] none",
        '{"name": "wea',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_text_that_is_no_call_is_kept_however_it_is_cut(text: str) -> None:
    assert read(auto(), text) == (text, [])
    assert read(auto(), *text) == (text, [])


@given(
    st.lists(
        st.sampled_from(["<", "<tool_call>", "</tool_call>", "{", "}", "[TOOL_", "CALLS]", '"name"', ":", " x", "\n"])
    )
)
def test_no_text_is_lost_or_fails(pieces: list[str]) -> None:
    content, calls = read(auto(), *pieces)
    assert calls or "".join(content.split()) == "".join("".join(pieces).split())


def test_text_is_passed_on_before_its_end() -> None:
    parser = auto()
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" <") == []
    assert parser.feed(" you") == [TextDelta(" < you")]
    assert parser.feed("<tool_call>") == []
    start, arguments = parser.feed('{"name": "weather"}</tool_call>')
    assert (start.index, start.name, arguments) == (0, "weather", ArgumentsDelta(0, "{}"))


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    assert read(auto(single=True), HERMES + HERMES) == ("", [BONN])


@pytest.mark.parametrize("make", [lambda: ArgumentsParser("weather")])
def test_arguments_are_passed_on_as_they_come(make: Callable[[], OutputParser]) -> None:
    assert read(make(), '{"place": ', '"Bonn"}') == ("", [BONN])
    assert len(make().feed("{")) == 2


def test_list_of_calls() -> None:
    text = '[{"name": "weather", "parameters": {"place": "Bonn"}}]'
    assert read(ListParser(), *text) == ("", [BONN])
    assert read(ListParser(), text[:20]) == (text[:20], [])
