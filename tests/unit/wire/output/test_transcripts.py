"""Transcripts of model families, cut at every place.

``transcripts/NAME.txt`` is what a model writes, ``NAME.json`` the part of its chat template that shows its format, and
the message that the text is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.wire.output.events import ArgumentsDelta
from conch.wire.output.formats import load, recognise
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools
from tests.unit.wire.output.reading import Message, read

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
TYPES = {
    "get_weather": {"city": ["string"], "days": ["integer"]},
    "get_time": {},
    "write_file": {"path": ["string"], "text": ["string"], "mode": ["integer"], "options": ["object"]},
    "brave_search": {"query": ["string"]},
}
TOOLS = Tools(b"", "auto", parameters=TYPES)


def loaded(path: Path) -> tuple[str, str, Message]:
    """The text, the output format of its model, and the message."""
    described: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    calls = [(name, arguments) for name, arguments in described["calls"]]
    message = Message(described["content"], described["reasoning"], calls)
    return path.read_text(), recognise([described["template"]]).dumps(), message


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_message_is_the_same_wherever_the_text_is_cut(path: Path) -> None:
    text, output_format, message = loaded(path)
    assert read(parser_for(TOOLS, output_format), text) == message
    assert read(parser_for(TOOLS, output_format), *text) == message
    for at in range(len(text)):
        assert read(parser_for(TOOLS, output_format), text[:at], text[at:]) == message, at


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_arguments_are_json_wherever_the_generation_ends(path: Path) -> None:
    text, output_format, message = loaded(path)
    for end in range(len(text)):
        cut = read(parser_for(TOOLS, output_format), text[:end])
        assert [name for name, _ in cut.calls] == [name for name, _ in message.calls][: len(cut.calls)]
        assert all(type(arguments) is dict for _, arguments in cut.calls)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tokens_of_the_format_are_never_content(path: Path) -> None:
    text, output_format, _ = loaded(path)
    unoffered = read(parser_for(Tools(), output_format), text)
    assert unoffered.calls == []
    calls = load(output_format).call_format
    assert not calls.special or not any(mark in unoffered.content for mark in calls.tokens)


def test_arguments_are_passed_on_as_they_are_written() -> None:
    path = next(path for path in FILES if path.stem == "qwen3_coder")
    text, output_format, _ = loaded(path)
    parser = parser_for(TOOLS, output_format)
    parser.feed(text[: text.index("def f(x)")])
    # A line break at the end is not part of the value.
    assert parser.feed("def f(x):\n") == [ArgumentsDelta(0, ',"text":"def f(x):')]
    assert parser.feed("    return ") == [ArgumentsDelta(0, "\\n    return ")]
