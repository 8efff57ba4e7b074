"""Reads ``config.pbtxt`` (protobuf text format); errors contain the position and a suggestion.

Suggestions depend only on the message of the parser and the text at its position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from google.protobuf import text_format

from conch.config.reading import ConfigError, FieldPath
from conch.config.schema import ModelConfig, unknown_enum_value
from conch.core.errors import did_you_mean, one_line

_UNKNOWN_FIELD: Final = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>[^"]+)"')
_UNKNOWN_VALUE: Final = re.compile(r'Enum type "(?P<enum>[\w.]+)" has no value named (?P<value>"?\w+"?)')

#: Names that other programs use for a field or a value, by the type that has it.
_OTHER_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "inference.DataType": {
        **dict.fromkeys(("BYTES", "STR", "TEXT", "CHAR", "UTF8", "OBJECT"), "TYPE_STRING"),
        **dict.fromkeys(("FLOAT", "FLOAT32", "SINGLE"), "TYPE_FP32"),
        **dict.fromkeys(("FLOAT16", "HALF"), "TYPE_FP16"),
        **dict.fromkeys(("FLOAT64", "DOUBLE"), "TYPE_FP64"),
        **dict.fromkeys(("INT", "INTEGER"), "TYPE_INT32"),
        "BFLOAT16": "TYPE_BF16",
        "LONG": "TYPE_INT64",
        "SHORT": "TYPE_INT16",
        "BYTE": "TYPE_UINT8",
        "BOOLEAN": "TYPE_BOOL",
    },
    "inference.ModelInstanceGroup.Kind": {"CUDA": "KIND_GPU"},
    "inference.ModelInput": {"shape": "dims", "dtype": "data_type", "type": "data_type"},
    "inference.ModelOutput": {"shape": "dims", "dtype": "data_type", "type": "data_type"},
    "inference.ModelConfig": {"batch_size": "max_batch_size", "batching": "dynamic_batching"},
}

#: Patterns of the parser's messages. Each has a function that takes the match and the unparsed rest of the text and
#: returns a hint.
_WRITING: Final[Sequence[tuple[re.Pattern[str], Callable[[re.Match[str], str], str]]]] = (
    (re.compile(r"Expected string but found: '(\w+)'"), lambda match, rest: f'write "{match[1]}", in quotation marks'),
    (
        re.compile('(?:Expected integer, got|Couldn\'t parse (?:float|boolean)[^"]*): "([\\w.+-]+)"'),
        lambda match, rest: f"write {match[1]}, without quotation marks",
    ),
    (re.compile("Expected integer, got: -$"), lambda match, rest: "write a number that is not negative"),
    (
        re.compile(r"Expected identifier or number, got [{\"]"),
        lambda match, rest: "this is not JSON: write name: value, without quotation marks around the name",
    ),
    (re.compile("missing ending quote"), lambda match, rest: "close the quotation mark on the same line"),
    (re.compile(r'Expected ":"'), lambda match, rest: "write ':' in place of '='" if rest.startswith("=") else ""),
    (re.compile(r'Expected ","'), lambda match, rest: "write ',' between the elements of a list"),
    (re.compile(r'Expected "\{"'), lambda match, rest: _message_expected(rest)),
)


def hint(detail: str, text: str, offset: int) -> str:
    """Return a suggested correction of a syntax error, or an empty string if none is known.

    ``detail`` is the parser's message, ``offset`` the position in ``text`` where it stopped.
    """
    pool = ModelConfig.DESCRIPTOR.file.pool
    before = text[:offset]
    if unknown := _UNKNOWN_FIELD.search(detail):
        if unknown["field"] in ModelConfig.DESCRIPTOR.fields_by_name and (open_at := _unclosed(before)):
            return f"{open_at} first"
        return _nearest(
            unknown["field"], unknown["message"], list(pool.FindMessageTypeByName(unknown["message"]).fields_by_name)
        )
    if unknown := _UNKNOWN_VALUE.search(detail):
        known = list(pool.FindEnumTypeByName(unknown["enum"]).values_by_name)
        value = unknown["value"].strip('"')
        if value in known:
            return f"write {value}, without quotation marks"
        return _nearest(value, unknown["enum"], known)
    if "Expected identifier or number, got {" in detail and (open_at := _unclosed(before)):
        return f"{open_at} first"
    for pattern, say in _WRITING:
        if match := pattern.search(detail):
            return say(match, text[offset:])
    return _unclosed(text) if 'Expected "}"' in detail else ""


def _nearest(wrong: str, kind: str, known: Sequence[str]) -> str:
    """Suggest the nearest known name, or list the known names.

    Recognises names that other programs use, names without their prefix (``GPU``), and misspelt names.
    """
    prefix = f"{known[0].partition('_')[0]}_" if known[0].isupper() else ""
    bare = wrong.upper().removeprefix(prefix) if prefix else wrong
    # The common prefix would make all names similar.
    names = {name.removeprefix(prefix): name for name in known} | dict(_OTHER_NAMES.get(kind, {}))
    return did_you_mean(bare, names, f"the valid names are {', '.join(known)}", shown=names.__getitem__)


def _message_expected(rest: str) -> str:
    if value := re.match(r'"[^"\n]*"', rest):
        return f"write {{ string_value: {value[0]} }}"
    if rest.startswith("]"):
        return "leave out the ',' after the last element of the list"
    if boolean := re.match(r"(true|false)\b", rest):
        return "write { }" if boolean[0] == "true" else "leave the field out"
    return ""


def _unclosed(text: str) -> str:
    """Return a hint to close the innermost unclosed ``{`` or ``[``, with its line; empty if there is none."""
    bare = re.sub(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", "", text)
    lines: list[int] = []
    for match in re.finditer(r"[\[\]{}]", bare):
        if match[0] in "[{":
            lines.append(bare.count("\n", 0, match.start()) + 1)
        elif lines:
            lines.pop()
    return f"close the bracket of line {lines[-1]}" if lines else ""


_MIN_INT32: Final = -(2**31)
_PLACEHOLDER = re.compile(r"\$\{[^{}\n]*\}")
#: Matches one token of the format; text between tokens is ``blank``.
TOKEN: Final = re.compile(
    r"""
    (?P<blank> \s+ | \#[^\n]* )
    | (?P<word> [-+]?[\w.]+ )
    | (?P<string> (?: "(?:\\.|[^"\\\n])*" \s* | '(?:\\.|[^'\\\n])*' \s* )+ )
    | (?P<mark> \S )
    """,
    re.VERBOSE,
)


def parse(text: str, source: str) -> ModelConfig:
    """Parse the text of a configuration; ``source`` is the file's path, for messages.

    Raises :class:`ConfigError` with line, column and, for a misspelt name, the nearest known one. An unfilled ``${…}``
    of a template is named in the error.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise _unreadable(error, text, source) from error
    except (ValueError, RecursionError) as error:
        # Raised by messages for numbers that exceed a field's type, and for nesting that is too deep.
        raise ConfigError(f"failed to read text proto from {source}: {one_line(error)}", path=source) from error
    if unknown := unknown_enum_value(config):
        raise ConfigError(f"failed to read text proto from {source}: unknown value of '{unknown}'", path=source)
    return config


def _unreadable(error: text_format.ParseError, text: str, source: str) -> ConfigError:
    line, column = error.GetLine() or 0, error.GetColumn() or 0
    unfilled = _unfilled(text, line, column)
    detail = unfilled or _in_known_words(re.sub(r"^\d+:\d+ ?: ", "", str(error)).strip())
    return ConfigError(
        f"failed to read text proto from {source}: {line}:{column}: {detail}",
        path=source,
        line=line,
        column=column,
        hint="replace the placeholder with the value" if unfilled else hint(detail, text, _offset(text, line, column)),
    )


def _in_known_words(detail: str) -> str:
    """Convert an error about a number to the wording of protobuf's C++ parser, which Triton logs."""
    if match := re.search(r"Couldn't parse integer: ([^\n]*)$", detail):
        return f"Expected integer, got: {match[1]}"
    if match := re.search(r"Value out of range: (-?\d+)$", detail):
        unsigned = _MIN_INT32 <= int(match[1]) < 0  # every signed field accepts it
        return "Expected integer, got: -" if unsigned else f"Integer out of range ({match[1].lstrip('-')})"
    return detail


def _offset(text: str, line: int, column: int) -> int:
    """Return the offset of a line and a column, both counted from 1."""
    before = text.split("\n")[: max(line - 1, 0)]
    return sum(len(line) + 1 for line in before) + max(column - 1, 0)


def _unfilled(text: str, line: int, column: int) -> str:
    """Return the message about a template's placeholder at this position; empty if there is none."""
    first = _PLACEHOLDER.match("".join(text.split("\n")[line - 1 : line]), max(column - 1, 0))
    if first is None:
        return ""
    others = dict.fromkeys(
        placeholder[0]
        for match in TOKEN.finditer(text)
        if match[0] == "$" and (placeholder := _PLACEHOLDER.match(text, match.start())) and placeholder[0] != first[0]
    )
    more = f", and so do {', '.join(others)}" if others else ""
    return f"{first[0]} of the template still needs a value{more}"


def locate(text: str, path: FieldPath) -> int:
    """Return the line (from 1) of the field at ``path`` in a valid text, or of its nearest existing parent.

    Returns 1 if no part of ``path`` exists.
    """
    at = _outline(text)
    line = 1
    steps = list(path)
    while steps:
        name = str(steps.pop(0))
        index = steps.pop(0) if steps and isinstance(steps[0], int) else 0
        values = at.fields.get(name, [])
        if index not in range(len(values)):
            break
        at = values[int(index)]
        line = at.line
    return line


@dataclass
class _Block:
    """A message in the text: its line, and the values of its fields in text order."""

    line: int
    fields: dict[str, list[_Block]] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _outline(text: str) -> _Block:
    tokens = list(_tokens(text))
    root = _Block(1)
    _read_fields(tokens, 0, root)
    return root


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in TOKEN.finditer(text):
        if match.lastgroup != "blank":
            yield match[0], line
        line += match[0].count("\n")


def _read_fields(tokens: list[tuple[str, int]], at: int, into: _Block) -> int:
    """Read ``name: value`` and ``name { … }`` up to the closing bracket; return the index after it."""
    while at < len(tokens):
        name, line = tokens[at]
        at += 1
        if name in "}>":
            return at
        if name in ",;":
            continue
        if at < len(tokens) and tokens[at][0] == ":":
            at += 1
        values = into.fields.setdefault(name, [])
        if at < len(tokens) and tokens[at][0] == "[":
            at += 1
            while at < len(tokens) and tokens[at][0] != "]":
                at = _read_value(tokens, at, tokens[at][1], values)
            at += 1
        else:
            at = _read_value(tokens, at, line, values)
    return at


def _read_value(tokens: list[tuple[str, int]], at: int, line: int, into: list[_Block]) -> int:
    if at >= len(tokens) or tokens[at][0] == ",":
        return at + 1
    block = _Block(line)
    into.append(block)
    if tokens[at][0] in "{<":
        return _read_fields(tokens, at + 1, block)
    return at + 1
