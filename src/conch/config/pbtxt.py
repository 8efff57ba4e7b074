"""Read ``config.pbtxt``: protobuf text format, with errors that say where and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from google.protobuf import text_format

from conch.config.hints import hint
from conch.config.problem import ConfigError, FieldPath
from conch.config.schema import ModelConfig, unknown_enum_value
from conch.errors import one_line

_MIN_INT32: Final = -(2**31)
_PLACEHOLDER = re.compile(r"\$\{[^{}\n]*\}")
#: One token of the format; what is between them is ``blank``.
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
    """The configuration that ``text`` describes; ``source`` is the file's path, for messages.

    Raises :class:`ConfigError` with line, column and, for a misspelt name, the nearest known one; a template's
    ``${…}`` that stands where it cannot stay is named.
    """
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise _unreadable(error, text, source) from error
    except (ValueError, RecursionError) as error:
        # Of the message, which takes no number of more bits than the field's, and of groups within groups.
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
        hint="put the value in its place" if unfilled else hint(detail, text, _offset(text, line, column)),
    )


def _in_known_words(detail: str) -> str:
    """A refusal of a number in the words that protobuf's parser for C++ has for it, which Triton logs."""
    if found := re.search(r"Couldn't parse integer: ([^\n]*)$", detail):
        return f"Expected integer, got: {found[1]}"
    if found := re.search(r"Value out of range: (-?\d+)$", detail):
        unsigned = _MIN_INT32 <= int(found[1]) < 0  # every signed field takes it
        return "Expected integer, got: -" if unsigned else f"Integer out of range ({found[1].lstrip('-')})"
    return detail


def _offset(text: str, line: int, column: int) -> int:
    """The place in the text of a line and a column that count from 1."""
    before = text.split("\n")[: max(line - 1, 0)]
    return sum(len(one) + 1 for one in before) + max(column - 1, 0)


def _unfilled(text: str, line: int, column: int) -> str:
    """The message about a template's placeholder at this place, empty where there is none."""
    found = _PLACEHOLDER.match("".join(text.split("\n")[line - 1 : line]), max(column - 1, 0))
    if found is None:
        return ""
    others = dict.fromkeys(
        placeholder[0]
        for match in TOKEN.finditer(text)
        if match[0] == "$" and (placeholder := _PLACEHOLDER.match(text, match.start())) and placeholder[0] != found[0]
    )
    more = f", and so do {', '.join(others)}" if others else ""
    return f"{found[0]} of the template still needs a value{more}"


def locate(text: str, path: FieldPath) -> int:
    """The line (from 1) of the field at ``path`` in a readable text, or of its nearest parent that is there.

    A path that names nothing in the text gives 1.
    """
    at = _outline(text)
    line = 1
    steps = list(path)
    while steps:
        name = str(steps.pop(0))
        index = steps.pop(0) if steps and isinstance(steps[0], int) else 0
        found = at.fields.get(name, [])
        if index not in range(len(found)):
            break
        at = found[int(index)]
        line = at.line
    return line


@dataclass
class _Block:
    """A message in the text: its line, and its fields' values in the order in which they come."""

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
    """Read ``name: value`` and ``name { … }`` up to the closing mark; return the place after it."""
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
