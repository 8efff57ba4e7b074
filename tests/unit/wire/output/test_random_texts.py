"""Random texts of marks and pieces of calls, in every format: nothing fails, and arguments are JSON."""

from __future__ import annotations

import random

import pytest

from conch.wire.output.formats import CALLS, OutputFormat
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools
from tests.unit.wire.output.reading import read

TOOLS = Tools(b"", "auto", parameters={"f": {"a": ["string"], "b": ["integer"], "c": []}})
PIECES = (
    *'{}[]()"\'\\,:= \n', "f", '{"name": "f", "arguments": {', '"a": "x', "f(a='", "call:f{", "12", "true", "<", "</",
    "<function=f>", "<parameter=a>", "</parameter>", "<parameter=b>", "</function>", "<arg_key>c</arg_key><arg_value>",
    "</arg_value>", "<think>", "</think>", "[ARGS]", "functions.f:0", "to=functions.f", "analysis", "final",
    "```json\n", "\\u00e4", "\\ud83d", "ä", '{"note":1}', "1e999", "٣", "a" * 450, "1" * 450, " " * 450,
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_random_text_gives_the_same_message_in_any_pieces(name: str) -> None:
    output_format = OutputFormat(name, ("<think>", "</think>"))
    marks, draw = output_format.call_format.tokens, random.Random(name)
    for _ in range(150):
        pieces = [draw.choice(draw.choice((PIECES, marks or PIECES))) for _ in range(draw.randrange(1, 14))]
        whole = read(parser_for(TOOLS, output_format.dumps()), "".join(pieces))
        assert read(parser_for(TOOLS, output_format.dumps()), *pieces) == whole, pieces
        assert read(parser_for(TOOLS, output_format.dumps()), *"".join(pieces)) == whole, pieces
        assert all(type(arguments) is dict for _, arguments in whole.calls)
