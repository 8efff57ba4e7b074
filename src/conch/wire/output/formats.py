"""The output formats of model families: how their models write tool calls and reasoning, and how each is recognised.

Sources: the chat templates and model cards of the families, OpenAI's description of harmony, and transformers'
``response_template``. Calls in most formats are a block between two marks. A call is a JSON object with a name and
arguments, or a header with the name, and arguments in JSON, as parameters, or in Python's notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from conch.wire.output.parameters import ParameterNotation


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a call: ``pattern`` has a group ``name`` and may have a group ``id``; arguments follow.

    Arguments are a JSON value, ``python`` (in Python's notation up to a parenthesis), or parameters.
    """

    pattern: re.Pattern[str]
    arguments: Literal["value", "python"] | ParameterNotation = "value"


@dataclass(frozen=True, slots=True)
class Block:
    """A text with calls, up to the mark ``close`` or the first text that is not a call.

    ``objects``: calls may be JSON objects. ``between`` matches the text between calls. ``quotes`` are marks that the
    format uses as quotes. ``keeps_mark``: the mark that begins the block is part of the first header.
    """

    close: str = ""
    objects: bool = False
    headers: tuple[Header, ...] = ()
    between: re.Pattern[str] = re.compile(r"[\s,;\[\]]*")
    quotes: tuple[str, ...] = ()
    keeps_mark: bool = False


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The rest of a block after its ``mark``, for structured output: an expression of llguidance's dialect of Lark.

    Marks are between tildes. In ``block``, CALL stands for a call of any tool in the form ``call``, and OBJECT for a
    call in the form of a JSON object; in ``call``, NAME and ARGUMENTS stand for those of one tool.
    """

    mark: str
    block: str
    call: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which models of a family write calls.

    ``signs`` recognise a chat template. ``blocks`` has the blocks by their first mark; ``bare`` is a block without a
    mark at the beginning of the answer, with calls of known tools alone. ``marks`` are the other marks of the format.
    ``special``: the marks are special tokens, which are never content. ``grammar``: the grammar of calls whose
    arguments are JSON; None for other formats, and for those in which a call can begin without a mark.
    """

    signs: tuple[str, ...]
    blocks: Mapping[str, Block]
    bare: Block | None = None
    marks: tuple[str, ...] = ()
    special: bool = True
    grammar: CallGrammar | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marks of the format."""
        closes = [block.close for block in self.blocks.values() if block.close]
        quotes = [quote for block in self.blocks.values() for quote in block.quotes]
        return (*self.blocks, *closes, *quotes, *self.marks)


def _header(pattern: str, arguments: Literal["value", "python"] | ParameterNotation = "value") -> Header:
    return Header(re.compile(pattern), arguments)


_FUNCTION: Final = _header(
    r"<function=(?P<name>[^>\n]+)>",
    ParameterNotation(re.compile(r"<parameter=(?P<key>[^<>\n]{1,200})>"), "</parameter>", "</function>", lines=True),
)
_INVOKE: Final = _header(
    r"<invoke name=\"(?P<name>[^\"]+)\">",
    ParameterNotation(
        re.compile(r"<parameter name=\"(?P<key>[^\"<]{1,200})\">"), "</parameter>", "</invoke>", lines=True
    ),
)
_DSML: Final = _header(
    r"<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">",
    ParameterNotation(
        re.compile(r"<｜DSML｜parameter name=\"(?P<key>[^\"<]{1,200})\"[^>]{0,100}>"),
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
    ),
)
_GLM: Final = _header(
    r"(?P<name>[^\s<{]+)\s*(?=<)",
    ParameterNotation(
        re.compile(r"<arg_key>(?P<key>[^<]{0,200})</arg_key>\s{0,100}<arg_value>"), "</arg_value>", "</tool_call>"
    ),
)  # fmt: skip
_MISTRAL: Final = _header(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?(?:\[ARGS\]\s*|(?=\{))")
_PYTHON: Final = _header(r"(?:print\(\s*)?(?!print\()(?P<name>[A-Za-z_][\w.-]*?)(?:\.call)?\(", "python")
_GEMMA: Final = _header(r"call:(?P<name>[\w.-]+)\s*(?=\{)")
_DEEPSEEK: Final = (
    _header(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<`{]+)\s*```(?:json)?\s"),
    _header(r"<｜tool▁call▁begin｜>(?!function<)(?P<name>[^\s<`{]+)<｜tool▁sep｜>"),
)
_KIMI: Final = _header(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<|]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
)


def _between(*texts: str) -> re.Pattern[str]:
    return re.compile(rf"(?:[\s,;\[\]]|{'|'.join(map(re.escape, texts))})*")


_HERMES: Final = {"<tool_call>": Block("</tool_call>", True, (_FUNCTION,), _between("</function>"))}
_MISTRAL_BLOCK: Final = Block("", True, (_MISTRAL,), re.compile(r"(?:[\s,;\]]|\[TOOL_CALLS\]|\[(?=[^T]))*"))
_LLAMA: Final = Block("", True, (_PYTHON,), _between("<|python_tag|>"))
_DEEPSEEK_BLOCK: Final = Block(
    "<｜tool▁calls▁end｜>", headers=_DEEPSEEK, between=_between("```", "<｜tool▁call▁end｜>")
)  # fmt: skip
_KIMI_BLOCK: Final = Block(
    "<|tool_calls_section_end|>", headers=(_KIMI,), between=_between("<|tool_call_end|>")
)  # fmt: skip

#: A list of calls in the form of JSON objects (``CallGrammar``).
_LIST: Final = r'/ ?\[/ OBJECT ("," OBJECT)* "]"'
_COHERE_CALL: Final = (
    r'/[ \n]{0,8}\{[ \n]{0,8}"tool_call_id" ?: ?"[0-9]{1,3}",[ \n]{0,8}"tool_name" ?: ?"/ NAME '
    r'/",[ \n]{0,8}"parameters" ?: ?/ ARGUMENTS /[ \n]{0,8}\}[ \n]{0,8}/'
)
_DEEPSEEK_CALL: Final = (
    r'~<｜tool▁call▁begin｜>~ ("function" ~<｜tool▁sep｜>~ NAME "\n```json\n" ARGUMENTS "\n```"'
    r" | NAME ~<｜tool▁sep｜>~ ARGUMENTS) ~<｜tool▁call▁end｜>~"
)
_KIMI_CALL: Final = (
    '~<|tool_call_begin|>~ "functions." NAME /:[0-9]{1,3}/ ~<|tool_call_argument_begin|>~ ARGUMENTS ~<|tool_call_end|>~'
)

#: The input of text models that keeps the marks of their format in the text, and begins it with a mark of reasoning
#: that the prompt ends with.
INCLUDE_MARKS: Final = "include_marks"

#: The formats of calls by name, in the order in which templates are compared with them.
CALLS: Final[Mapping[str, CallFormat]] = {
    "harmony": CallFormat(
        ("<|channel|>", "<|message|>"), {},
        marks=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "deepseek": CallFormat(
        ("<｜tool▁calls▁begin｜>",),
        {"<｜tool▁calls▁begin｜>": _DEEPSEEK_BLOCK},
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        grammar=CallGrammar(
            "<｜tool▁calls▁begin｜>", r'("\n"? CALL)+ "\n"? ~<｜tool▁calls▁end｜>~', _DEEPSEEK_CALL
        ),
    ),
    "deepseek-dsml": CallFormat(
        ("｜DSML｜",),
        {"<｜DSML｜function_calls>": Block(
            "</｜DSML｜function_calls>", headers=(_DSML,), between=_between("</｜DSML｜invoke>")
        )},
        special=False,
    ),
    "kimi": CallFormat(
        ("<|tool_calls_section_begin|>",),
        {"<|tool_calls_section_begin|>": _KIMI_BLOCK},
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        grammar=CallGrammar("<|tool_calls_section_begin|>", "CALL+ ~<|tool_calls_section_end|>~", _KIMI_CALL),
    ),
    "gemma4": CallFormat(
        ("<|tool_call>",), {"<|tool_call>": Block("<tool_call|>", headers=(_GEMMA,), quotes=('<|"|>',))},
        marks=("<|tool_response>", "<tool_response|>"),
    ),
    "functiongemma": CallFormat(
        ("<start_function_call>",),
        {"<start_function_call>": Block("<end_function_call>", headers=(_GEMMA,), quotes=("<escape>",))},
        marks=("<start_function_response>",),
    ),
    "glm": CallFormat(("<arg_key>",), {"<tool_call>": Block("</tool_call>", headers=(_GLM,))}, special=False),
    "seed": CallFormat(
        ("<seed:tool_call>",),
        {"<seed:tool_call>": Block("</seed:tool_call>", False, (_FUNCTION,), _between("</function>"))},
        special=False,
    ),
    "minimax": CallFormat(
        ("<minimax:tool_call>",),
        {"<minimax:tool_call>": Block("</minimax:tool_call>", False, (_INVOKE,), _between("</invoke>"))},
        special=False,
    ),
    "qwen3-coder": CallFormat(
        ("<function=",),
        {**_HERMES, "<function=": Block("</tool_call>", False, (_FUNCTION,), _between("</function>"), keeps_mark=True)},
        special=False,
    ),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",), {"[TOOL_CALLS]": _MISTRAL_BLOCK}, marks=("[ARGS]", "[CALL_ID]", "[/TOOL_CALLS]"),
        grammar=CallGrammar(
            "[TOOL_CALLS]", f"CALL (~[TOOL_CALLS]~ CALL)* | {_LIST}",
            "NAME (~[CALL_ID]~ /[a-zA-Z0-9]{1,16}/)? ~[ARGS]~? ARGUMENTS",
        ),
    ),
    "lfm2": CallFormat(
        ("<|tool_call_start|>",), {"<|tool_call_start|>": Block("<|tool_call_end|>", True, (_PYTHON,))},
    ),
    "cohere": CallFormat(
        ("<|START_ACTION|>",), {"<|START_ACTION|>": Block("<|END_ACTION|>", objects=True)},
        marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        grammar=CallGrammar("<|START_ACTION|>", r'"[" CALL ("," CALL)* "]" "\n"? ~<|END_ACTION|>~', _COHERE_CALL),
    ),
    "phi4": CallFormat(
        ("<|tool_call|>",), {"<|tool_call|>": Block("<|/tool_call|>", objects=True)},
        grammar=CallGrammar("<|tool_call|>", f"{_LIST} ~<|/tool_call|>~?"),
    ),
    "hermes": CallFormat(
        ("<tool_call>",), _HERMES, special=False, grammar=CallGrammar("<tool_call>", "OBJECT ~</tool_call>~"),
    ),
    "olmo": CallFormat(
        ("<function_calls>",), {"<function_calls>": Block("</function_calls>", headers=(_PYTHON,))}, special=False,
    ),
    "gemma3": CallFormat(
        ("tool_code",), {"```tool_code": Block("```", headers=(_PYTHON,), between=_between(")"))},
        special=False,
    ),
    "llama": CallFormat(
        ("<|python_tag|>", "<|python_start|>", '"parameters": dictionary of argument name', "func_name1("),
        {"<|python_tag|>": _LLAMA, "<|python_start|>": Block("<|python_end|>", headers=(_PYTHON,))},
        bare=_LLAMA, marks=("<|eom_id|>",),
    ),
    # Calls of models whose template is unknown.
    "any": CallFormat(
        (), {**_HERMES, "[TOOL_CALLS]": _MISTRAL_BLOCK, "<|python_tag|>": _LLAMA}, bare=_LLAMA,
        special=False,
    ),
}  # fmt: skip
#: The template of harmony has all of its signs, those of other formats one.
_ALL_SIGNS: Final = frozenset({"harmony"})

#: The marks around reasoning. A chat template that contains one of them is of a model that reasons.
_REASONING: Final = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<think>", "</think>"),
    ("Here is my thought process:", "Here is my response:"),
)
#: Marks around the answer after reasoning (Granite), which are not content.
_ANSWER: Final = ("<response>", "</response>")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The output format of a model: the name of its format of calls, and the marks around its reasoning.

    ``marks`` are those of a ``response_template`` around calls that are JSON objects. ``answer``: marks around the
    answer, which are left out.
    """

    calls: str = "any"
    reasoning: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    answer: tuple[str, ...] = field(default=())

    def dumps(self) -> str:
        """Return the format as JSON."""
        return json.dumps(asdict(self))

    @property
    def call_format(self) -> CallFormat:
        if self.marks:
            return CallFormat((), {self.marks[0]: Block(self.marks[1], objects=True)}, special=False)
        return CALLS[self.calls]

    @property
    def tokens(self) -> tuple[str, ...]:
        """All texts of the format that may be special tokens."""
        return (*self.call_format.signs, *self.call_format.tokens, *self.reasoning, *self.answer)


#: The format of models that do not report theirs.
UNKNOWN: Final = OutputFormat()


@lru_cache(64)
def load(text: str) -> OutputFormat:
    """Return the format that ``dumps`` has written; the one of unknown models for an empty or unknown text."""
    try:
        members = json.loads(text)
        output_format = OutputFormat(members.pop("calls"), **{name: tuple(value) for name, value in members.items()})
    except (ValueError, TypeError, AttributeError, KeyError):
        return UNKNOWN
    return output_format if output_format.calls in CALLS else UNKNOWN


def recognise(templates: Iterable[str], response_template: Any = None) -> OutputFormat:
    """Return the output format for the chat templates of a model.

    ``response_template`` is the member of tokenizer_config.json that describes the output for transformers; its marks
    take precedence.
    """
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    text = "\n".join(templates)
    described = json.dumps(fields, ensure_ascii=False).replace("\\\\", "")
    calls = _calls(described) if "tool_calls" in fields else ""
    marks: tuple[str, ...] = ()
    if "tool_calls" in fields and not calls:
        marks = _marks(fields["tool_calls"])
    reasoning: tuple[str, ...] = ()
    for name in ("thinking", "reasoning_content", "reasoning"):
        reasoning = reasoning or _marks(fields.get(name))
    calls = calls or _calls(text) or "any"
    if calls == "harmony":
        return OutputFormat(calls)
    if not reasoning:
        reasoning = next((pair for pair in _REASONING if any(mark in text for mark in pair)), ())
    answer = _ANSWER if reasoning and _ANSWER[0] in text else ()
    return OutputFormat(calls, reasoning, marks, answer)


def _calls(text: str) -> str:
    """Return the name of the first format whose signs are in ``text``; empty if there is none."""
    for name, known in CALLS.items():
        if known.signs and (all if name in _ALL_SIGNS else any)(sign in text for sign in known.signs):
            return name
    return ""


def _marks(described: Any) -> tuple[str, ...]:
    """Return the first and last mark of a field of a response template; empty if they are not plain texts."""
    if not isinstance(described, dict):
        return ()
    marks = [described.get(name) for name in ("open", "close")]
    texts = [mark[0] if isinstance(mark, list) and mark else mark for mark in marks]
    if described.get("content", "text") not in ("text", "json"):
        return ()
    return tuple(text.strip() for text in texts if isinstance(text, str)) if all(texts) else ()
