"""The output formats that chat templates and response templates show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from conch.wire.output.formats import CALLS, UNKNOWN, OutputFormat, load, recognise
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools
from tests.unit.wire.output.reading import Message, read

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "thinking": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
            },
            OutputFormat("hermes", THINK),
        ),
        (
            {
                "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
                "tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>"},
            },
            OutputFormat("gemma4", ("<|channel>thought", "<channel|>")),
        ),
        (
            {
                "reasoning_content": {"open": "<r>", "close": ["</r>", "<end>"]},
                "tool_calls": {"open": "<call>", "close": "</call>", "content": "json"},
            },
            OutputFormat("any", ("<r>", "</r>"), ("<call>", "</call>")),
        ),
        ({"content": {"close": "<end>"}}, UNKNOWN),
        ("nonsense", UNKNOWN),
    ],
)
def test_response_template_has_the_marks(fields: Any, expected: OutputFormat) -> None:
    recognised = recognise([], {"fields": fields})
    assert recognised == expected
    assert load(recognised.dumps()) == expected


def test_marks_of_a_response_template_are_parsed() -> None:
    output_format = OutputFormat("any", ("<r>", "</r>"), ("<call>", "</call>")).dumps()
    parser = parser_for(Tools(b"", "auto", parameters={"f": {}}), output_format)
    text = '<r>Well.</r><call>{"name": "f", "arguments": {"a": 1}}</call>'
    assert read(parser, *text) == Message("", "Well.", [("f", {"a": 1})])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"calls": "another"}', '{"calls": "hermes", "more": 1}'])
def test_unknown_format_is_that_of_unknown_models(text: str) -> None:
    assert load(text) == UNKNOWN


def test_structured_text_is_the_answer() -> None:
    tools = Tools(b"", "auto", parameters={"f": {}})
    text = '{"name": "f", "parameters": {}}'
    assert read(parser_for(tools, structured=True), text) == Message(text)


def test_documentation_lists_the_formats() -> None:
    page = (Path(__file__).parents[4] / "docs/openai.md").read_text()
    table = re.findall(r"^\| (`[a-z].*?) \|", page[page.index("| `output_format` |") :].split("\n\n")[0], re.MULTILINE)
    assert sorted(name for row in table for name in re.findall("`([^`]+)`", row)) == sorted(["output_format", *CALLS])
