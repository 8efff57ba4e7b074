"""Tool calls that a model begins itself: free text up to the mark, then calls of the tools by their schemas."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

from conch.backends.batching.grammars import CompiledStructure, GrammarCompiler, Matcher, restrict
from conch.checkpoints.tokenizers.fast import TokenBytes
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import ReasoningTokens
from conch.wire.output.formats import CALLS, OutputFormat
from conch.wire.output.parsers import parser_for
from conch.wire.output.tools import Tools, strict_calls
from tests.unit.backends.batching.schemas import EOS, TOKENS
from tests.unit.wire.output.reading import Message, read

SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/count"}, "unit": {"enum": ["m", "km"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 999}},
}
FLAG = {
    "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False
}  # fmt: skip
#: A call in each format: its name and its arguments.
CALL = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "mistral": "[TOOL_CALLS]%s[ARGS]%s",
    "mistral, without a second mark": "[TOOL_CALLS]%s%s",
    "mistral, a list": '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
    "phi4": '<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```"
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek, since 3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
                           "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s"
            "<|tool_call_end|><|tool_calls_section_end|>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "%s", "parameters": %s}\n]<|END_ACTION|>',
}  # fmt: skip
#: Several calls in one block.
SEVERAL = {
    "phi4": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "unit": "m"}}, {"name": "add_all", "arguments": {}}]',
    "mistral, a list": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "unit": "m"}},\n'
                       '{"name": "add_all", "arguments": {}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
                '{"a": 1, "unit": "m"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add_all\n'
                "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1, "unit": "m"}<|tool_call_end|><|tool_call_begin|>functions.add_all:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
}  # fmt: skip
OPEN, CLOSE = "<think>", "</think>"


class Vocabulary:
    """A tokenizer of bytes, with the marks of a format as special tokens, or as the bytes of their texts."""

    def __init__(self, name: str, *, special: bool) -> None:
        self.name = name.partition(",")[0]
        marks = [*dict.fromkeys(CALLS[self.name].tokens)] if special else []
        self._marks = {mark: len(TOKENS) + index for index, mark in enumerate((OPEN, CLOSE, *marks))}
        self.tokens = [*TOKENS, *(mark.encode() for mark in self._marks), b'>{"', b"a>", b"] [", b"x[TOOL_CALLS]y"]
        self.special = frozenset((EOS, *(self._marks[mark] for mark in marks)))
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        ids, end = [], 0
        for match in self._pattern.finditer(text):
            ids += [*text[end : match.start()].encode(), self._marks[match.group()]]
            end = match.end()
        return [*ids, *text[end:].encode()]

    def id(self, token: bytes) -> int:
        return self.tokens.index(token)

    def compile(self, *functions: dict[str, Any]) -> CompiledStructure:
        tools = [{"type": "function", "function": function} for function in functions]
        structure = strict_calls(tools, CALLS[self.name].grammar)
        assert structure is not None
        tokenizer: Any = self
        compiler = GrammarCompiler(tokenizer, TokenBytes(self.tokens, self.special), len(self.tokens), (EOS,))
        return compiler.compile(structure)

    def read(self, text: str) -> Message:
        tools = Tools(b"", "auto", parameters={"add": {}, "add_all": {}})
        return read(parser_for(tools, OutputFormat(self.name, (OPEN, CLOSE)).dumps()), text)


ADD = {"name": "add", "parameters": SCHEMA, "strict": True}
#: A tool whose name begins with the name of the other, and whose arguments are free.
ADD_ALL = {"name": "add_all", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}}


def allowed(matcher: Matcher, size: int) -> np.ndarray[Any, Any]:
    scores = np.zeros((1, size), np.float32)
    restrict(scores, [matcher])
    return np.flatnonzero(scores[0] == 0)


def accepted(compiled: CompiledStructure, ids: list[int], reasoning: ReasoningTokens | None = None) -> int:
    """Return the number of tokens that are allowed one after the other."""
    matcher = Matcher(compiled, reasoning)
    for count, token in enumerate(ids):
        if token not in allowed(matcher, len(compiled.tokens)):
            return count
        assert matcher.accept(token) is None
    return len(ids)


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", CALL)
def test_calls_between_free_text_are_allowed(name: str, special: bool) -> None:
    vocabulary = Vocabulary(name, special=special)
    compiled = vocabulary.compile(ADD, ADD_ALL)
    calls = [CALL[name] % ("add", '{"a": 12, "unit": "km"}'), CALL[name] % ("add_all", '{"on": [{"x": "}"}]}')]
    expected = [("add", {"a": 12, "unit": "km"}), ("add_all", {"on": [{"x": "}"}]})]
    # In Mistral's format, nothing but calls follows a call, and in a list nothing but the end.
    between, end = ("", "") if name.startswith("mistral") else (" {So} ", " [Well]. ")
    count = 1 if "list" in name else 2
    text = f'Let "me" {{"see"}}: {between.join(calls[:count])}{end}'
    ids = [*vocabulary.encode(text), EOS]
    assert accepted(compiled, ids) == len(ids)
    assert vocabulary.read(text).calls == expected[:count]
    # A text without a call is free, and so is one that only resembles a call.
    ids = [*vocabulary.encode('It is {"name": 1} <tool_cal>[TOOL_CALL]<|tool_cal.'), EOS]
    assert accepted(compiled, ids) == len(ids)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_in_a_block_are_allowed(name: str) -> None:
    vocabulary = Vocabulary(name, special=True)
    ids = [*vocabulary.encode(SEVERAL[name]), EOS]
    assert accepted(vocabulary.compile(ADD, ADD_ALL), ids) == len(ids)
    assert vocabulary.read(SEVERAL[name]).calls == [("add", {"a": 1, "unit": "m"}), ("add_all", {})]


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "texts"])
@pytest.mark.parametrize("name", CALL)
def test_other_names_and_arguments_are_refused(name: str, special: bool) -> None:
    vocabulary = Vocabulary(name, special=special)
    compiled = vocabulary.compile(ADD, ADD_ALL)
    for call, begin in (
        (("adder", "{}"), "add"),
        (("add", '{"a": "1"}'), '{"a": '),
        (("add", '{"a": 1000,'), '{"a": 100'),
        (("add", '{"a": 1}'), '{"a": 1'),
        (("add", '{"a": 1, "unit": "mm"}'), '{"a": 1, "unit": "m'),
        (("add_all", "7"), ""),
    ):
        text = f"Then: {CALL[name] % call}"
        before = text[: text.index(begin) + len(begin) if begin else text.index("7")]
        ids = vocabulary.encode(before)
        assert accepted(compiled, vocabulary.encode(text)) == len(ids), call
        # The text cannot end within a call.
        assert accepted(compiled, [*ids, EOS]) == len(ids), call


@pytest.mark.parametrize("name", CALL)
def test_every_call_that_is_drawn_at_random_is_read_as_a_call_of_a_tool(name: str) -> None:
    vocabulary = Vocabulary(name, special=True)
    schemas = {"add": SCHEMA, "add_all": FLAG}
    compiled = vocabulary.compile(ADD, {"name": "add_all", "parameters": FLAG, "strict": True})
    mark = vocabulary.encode(CALL[name])[:1]
    for seed in range(8):
        random, matcher = np.random.default_rng(seed), Matcher(compiled)
        ids = list(mark)
        assert matcher.accept(ids[0]) is None
        while not matcher.is_free and ids[-1] != EOS:
            ids.append(int(random.choice(allowed(matcher, len(vocabulary.tokens)))))
            assert matcher.accept(ids[-1]) is None
            assert len(ids) < 3000
        text = b"".join(vocabulary.tokens[id] for id in ids if id != EOS).decode()
        message = vocabulary.read(text)
        assert message.calls and not message.content, text
        for called, arguments in message.calls:
            jsonschema.validate(arguments, schemas[called])


def test_token_that_ends_the_mark_and_goes_on_is_refused() -> None:
    vocabulary = Vocabulary("hermes", special=False)
    compiled = vocabulary.compile(ADD)
    crossing, inner = vocabulary.id(b'>{"'), vocabulary.id(b"a>")
    before = vocabulary.encode("<tool_call")
    assert accepted(compiled, [*before, crossing]) == len(before)
    assert accepted(compiled, [*before[:-1], crossing]) == len(before)
    assert accepted(compiled, [*before, inner, *before, *vocabulary.encode(">x")]) == 2 * len(before) + 2
    # A token with the whole mark and more.
    vocabulary = Vocabulary("mistral", special=True)
    compiled = vocabulary.compile(ADD)
    assert accepted(compiled, [vocabulary.id(b"x[TOOL_CALLS]y")]) == 0
    # A special token adds no text, so the mark goes on after it.
    ids = [*b"[TOOL_", vocabulary.id(b"[ARGS]"), *b"CALLS]", *b"ad"]
    assert accepted(compiled, [*ids, *b"e"]) == len(ids)


def test_marks_in_the_reasoning_begin_no_call() -> None:
    vocabulary = Vocabulary("hermes", special=True)
    compiled = vocabulary.compile(ADD)
    first, last = vocabulary.encode(OPEN + CLOSE)
    call = CALL["hermes"] % ("add", '{"a": 1, "unit": "m"}')
    wrong = "<tool_call>wrong</tool_call>"
    for begun, text in (
        (True, f"Hm, {wrong}{CLOSE}{call}"),
        (False, f"{OPEN}{wrong}{CLOSE}\nSo: {call}\n{OPEN}{wrong}{CLOSE}{call}"),
        (False, f"{call}{call}"),
    ):
        ids = [*vocabulary.encode(text), EOS]
        assert accepted(compiled, ids, ReasoningTokens(first, last, begun)) == len(ids), text
        ids = vocabulary.encode(text + wrong)
        count = len(vocabulary.encode(text + "<tool_call>"))
        assert accepted(compiled, ids, ReasoningTokens(first, last, begun)) == count, text
    # Text has begun, so the mark of reasoning is text.
    text = f"Well {OPEN}<tool_call>"
    count = len(vocabulary.encode(text))
    assert accepted(compiled, vocabulary.encode(text + "wrong"), ReasoningTokens(first, last, False)) == count


def test_structure_needs_a_strict_tool_and_a_format_with_json() -> None:
    tools = [{"type": "function", "function": function} for function in (ADD, ADD_ALL)]
    grammar = CALLS["hermes"].grammar
    assert strict_calls(tools, grammar) is not None
    assert strict_calls(tools[1:], grammar) is None
    assert strict_calls(tools, CALLS["lfm2"].grammar) is None
    assert strict_calls([{"type": "function", "function": {**ADD, "name": "a b"}}], grammar) is None
    assert strict_calls([*tools, "other"], grammar) is None


def test_schema_of_a_strict_tool_that_is_not_supported_is_refused() -> None:
    with pytest.raises(ConchError) as caught:
        Vocabulary("hermes", special=True).compile({**ADD, "parameters": {"not": {}}})
    assert caught.value.code is Code.INVALID_ARG
    assert "this tool call does not compile: keyword 'not' is not supported" in caught.value.message
