"""Tool calls in texts, whole and in pieces of every size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.wire.output.events import ArgumentsDelta, OutputParser, TextDelta, ToolCallStart
from conch.wire.output.formats import OutputFormat
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools
from tests.unit.wire.output.reading import Message, read

TYPES = {"weather": {"place": ["string"]}, "time.now": {}}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
BONN = ("weather", {"place": "Bonn"})


def auto(*, single: bool = False) -> OutputParser:
    """The parser for a model that does not report its format."""
    return parser_for(Tools(b"", "auto", parameters=TYPES, single=single))


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
    message = Message(content, calls=calls)
    assert read(auto(), text) == message
    assert read(auto(), *text) == message
    for at in range(len(text)):
        assert read(auto(), text[:at], text[at:]) == message, at


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
    assert read(auto(), text) == Message(text)
    assert read(auto(), *text) == Message(text)


@given(
    st.lists(
        st.sampled_from(["<", "<tool_call>", "</tool_call>", "{", "}", "[TOOL_", "CALLS]", '"key"', ":", " x", "\n"])
    )
)
def test_no_text_is_lost_or_fails(pieces: list[str]) -> None:
    message = read(auto(), *pieces)
    assert message.calls or "".join(message.content.split()) == "".join("".join(pieces).split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'<tool_call>{{"name":"f","arguments":{{}}}}\n{{"note":1}}</tool_call>\n{HERMES} bye',
         Message("bye", calls=[("f", {}), BONN])),
        ('<tool_call>{"note":1}</tool_call> ' + HERMES, Message('<tool_call>{"note":1}</tool_call>', calls=[BONN])),
        ('[TOOL_CALLS]f{}{"note":1}[TOOL_CALLS]weather{"place": "Bonn"}', Message(calls=[("f", {}), BONN])),
        ('<tool_call>{"name": "f", "argum', Message()),
        ('<tool_call>{"name": "wea', Message()),
        ("\n" * 300 + "Well. " + HERMES, Message("\n" * 300 + "Well.", calls=[BONN])),
        ("{" + " " * 300 + HERMES, Message("{", calls=[BONN])),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 500 + "}}", Message(calls=[("f", {"a": "1" * 500})])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999, "b": 1٣}}',
         Message(calls=[("f", {"a": "1e999", "b": "1٣"})])),
        ("<tool_call><function=weather><parameter=n>01e999</parameter></function>",
         Message(calls=[("weather", {"n": "01e999"})])),
        ('<|python_tag|>weather("Bonn", place="Rome", 3, 4)',
         Message(calls=[("weather", {"place": "Bonn", "argument0": "Rome", "argument1": 3, "argument2": 4})])),
    ],
)  # fmt: skip
def test_malformed_calls(text: str, message: Message) -> None:
    assert read(auto(), text) == message
    assert read(auto(), *text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|channel|>final The answer", Message("The answer")),
        (
            "<|channel|>final The answer<|end|><|start|>assistant<|channel|>final<|message|>More",
            Message("The answer\n\nMore"),
        ),
        ("<|channel|>analysis Well" + "." * 500, Message("", "Well" + "." * 500)),
        ("<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|chan", Message("", "Well.")),
        ("assistants " + "help " * 100, Message("assistants " + "help " * 100)),
    ],
)
def test_harmony_without_the_text_of_a_message(text: str, message: Message) -> None:
    harmony = OutputFormat("harmony").dumps()
    assert read(parser_for(Tools(), harmony), text) == message
    assert read(parser_for(Tools(), harmony), *text) == message


def test_long_object_without_a_call_is_passed_on_before_its_end() -> None:
    parser = auto()
    text = '<tool_call>{"a": "' + "b" * 100_000
    assert parser.feed(text) == [TextDelta(text)]
    assert read(auto(), text, HERMES) == read(auto(), text + HERMES) == Message(text, calls=[BONN])


def test_long_arguments_are_passed_on_whole() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"place": "' + "b" * 200_000 + '"}}</tool_call>'
    assert read(auto(), text) == Message(calls=[("weather", {"place": "b" * 200_000})])


def test_long_header_is_passed_on_before_its_end() -> None:
    parser = parser_for(Tools(), OutputFormat("harmony").dumps())
    assert parser.feed("assistant " + "a" * 390)


def test_text_is_passed_on_before_its_end() -> None:
    parser = auto()
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" <") == []
    assert parser.feed(" you") == [TextDelta(" < you")]
    assert parser.feed("<tool_call>") == []
    start, arguments = parser.feed('{"name": "weather"}</tool_call>')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name, arguments) == (0, "weather", ArgumentsDelta(0, "{}"))


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    assert read(auto(single=True), HERMES + HERMES) == Message(calls=[BONN])


def named() -> OutputParser:
    return parser_for(Tools(b"", "named", "weather", parameters=TYPES))


def test_arguments_of_a_named_tool_are_passed_on_as_they_come() -> None:
    assert read(named(), '{"place": ', '"Bonn"}') == Message(calls=[BONN])
    parser = named()
    start, arguments = parser.feed('{"place": "Bo')
    assert isinstance(start, ToolCallStart)
    assert (start.name, arguments) == ("weather", ArgumentsDelta(0, '{"place":"Bo'))
    assert parser.finish() == [ArgumentsDelta(0, '"}')]


def test_named_tool_is_called_without_any_text() -> None:
    assert read(named()) == Message(calls=[("weather", {})])


def test_list_of_calls() -> None:
    text = '[{"name": "weather", "parameters": {"place": "Bonn"}}, {"name": "time.now", "parameters": {}}]'
    required = Tools(b"", "required", parameters=TYPES)
    assert read(parser_for(required), *text) == Message(calls=[BONN, ("time.now", {})])
    for end in (1, 4, 11, 20, 30):
        assert read(parser_for(required), text[:end]) == Message(), end
    assert read(parser_for(required), "None.") == Message("None.")
    assert read(parser_for(required), text[:47]) == Message(calls=[("weather", {"place": "B"})])
