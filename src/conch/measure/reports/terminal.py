"""Renders reports for a terminal, with rich: text and tables in its width, charts as their descriptions."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from conch.measure.reports.report import (
    Block,
    Bullets,
    Cell,
    Chart,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Section,
    Table,
    Tiles,
    Tone,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_TONES: Final[dict[Tone, str]] = {"": "", "good": "green", "bad": "red", "muted": "dim"}
_KINDS: Final = {"info": "", "warning": "yellow", "error": "red"}
#: Columns of the terminal between two columns of a table.
_GAP: Final = 2
#: The width of pipes and files, wider than any line: programs that read a table need whole rows.
_UNWRAPPED: Final = 10_000
#: The width at which a text in a cell may be wrapped, unless a word is longer.
_WRAPPED: Final = 24


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or standard error.

    It has the width and the colours of a terminal; a pipe or a file gets unwrapped lines without colours.
    """
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(stderr=stderr)
    return Console(stderr=stderr, width=_UNWRAPPED, no_color=True, force_terminal=False)


def show(console: Console, *parts: Report | Section | Block) -> None:
    """Print parts of a report, in the width of the console; a section after another part follows an empty line."""
    for number, part in enumerate(parts):
        if number and isinstance(part, Section):
            console.print()
        for piece in _render(part, console.width):
            # A command is one line, also where the terminal breaks it.
            console.print(piece, highlight=False, soft_wrap=isinstance(piece, Text))


def _render(part: Report | Section | Block, width: int) -> Iterator[RenderableType]:
    match part:
        case Report():
            yield Text(_hanging(part.title, 0, width), "bold")
            for block in (*([Paragraph(part.lead)] if part.lead else []), *part.opening):
                yield from _block(block, width)
            for section in part.sections:
                yield Text()
                yield from _render(section, width)
        case Section():
            yield Text(_hanging(part.title, 0, width), "bold")
            for block in part.blocks:
                for piece in _block(block, width - _GAP):
                    yield _indented(piece)
        case _:
            yield from _block(part, width)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    match block:
        case Paragraph(text):
            yield Text(_hanging(text, 0, width))
        case Bullets(items):
            for item in items:
                yield Text(_hanging(f"- {item}", 2, width))
        case Note(kind, text):
            yield Text(_hanging(f"{kind}: {text}", 0, width), _KINDS[kind])
        case Tiles(items):
            yield from _block(Bullets(list(map(str, items))), width)
        case Properties(items):
            indent = max((len(name) for name, _ in items), default=0) + _GAP
            for name, value in items:
                yield Text(_hanging(f"{name:<{indent}}{value}", indent, width))
        case CodeBlock(text, caption):
            if caption:
                yield Text(_hanging(caption, 0, width))
            yield _indented(Text(text))
        case Table():
            yield _table(block, width)
        case Chart():
            yield Text(_hanging(f"{block.title}: {block.alt}", 0, width))


def _indented(piece: RenderableType) -> RenderableType:
    if isinstance(piece, Text):
        return Text(textwrap.indent(piece.plain, " " * _GAP), piece.style)
    return Padding(piece, (0, 0, 0, _GAP), expand=False)


def _hanging(text: str, indent: int, width: int) -> str:
    """Wrap a line; the lines below it are indented. Long words, such as paths and commands, are not broken."""
    lines = text.splitlines() or [""]
    return "\n".join(
        textwrap.fill(line, max(width, indent + 20), subsequent_indent=" " * indent, break_long_words=False,
             break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True)
        for line in lines
    )  # fmt: skip


def _table(table: Table, width: int) -> RichTable:
    if _needed(table) > width:
        table = _narrowed(table)
    texts = [table.texts(row) for row in table.rows]
    lines = any("\n" in cell for cells in texts for cell in cells)
    shown = RichTable(box=None, pad_edge=False, header_style="bold",
                      title=Text(table.caption) if table.caption else None, title_justify="left", title_style="bold",
                      show_header=any(column.heading for column in table.columns))  # fmt: skip
    for column, cells in zip(table.columns, _transposed(table, texts), strict=True):
        space = max((len(line) for cell in cells for line in cell.split("\n")), default=0)
        shown.add_column(
            Text(_broken(column.heading, space)), justify="right" if column.number else "left", no_wrap=column.number,
            overflow="ellipsis" if column.number else "fold",
        )  # fmt: skip
    for number, (row, cells) in enumerate(zip(table.rows, texts, strict=True)):
        if lines and number:
            shown.add_row()
        shown.add_row(*map(Text, cells), style=_TONES[row.tone])
    return shown


def _needed(table: Table) -> int:
    """Return the width of a table whose numbers are whole, and whose texts are readable."""
    texts = [table.texts(row) for row in table.rows]
    widths = []
    for column, cells in zip(table.columns, _transposed(table, texts), strict=True):
        lines = [line for cell in cells for line in cell.split("\n")]
        longest = max(map(len, lines), default=0)
        whole = [column.heading, *(() if column.number else lines)]
        words = max((len(word) for text in whole for word in text.split()), default=0)
        widths.append(max(words, longest if column.number else min(longest, _WRAPPED)))
    return sum(widths) + _GAP * (len(widths) - 1)


def _narrowed(table: Table) -> Table:
    """Return the table for a narrow terminal: with short headings, without hidden columns, with stacked cells."""
    groups: list[list[int]] = []
    for number, column in enumerate(table.columns):
        if column.narrow == "stack" and groups:
            groups[-1].append(number)
        elif column.narrow != "hide":
            groups.append([number])

    def stacked(texts: Sequence[str]) -> list[Cell]:
        return ["\n".join(filter(None, (texts[number] for number in group))) for group in groups]

    headings = stacked([column.short or column.heading for column in table.columns])
    columns = [
        Column(str(heading), table.columns[group[0]].number) for heading, group in zip(headings, groups, strict=True)
    ]
    return Table(table.caption, columns, [replace(row, cells=stacked(table.texts(row))) for row in table.rows])


def _transposed(table: Table, texts: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[cells[number] for cells in texts] for number in range(len(table.columns))]


def _broken(heading: str, width: int) -> str:
    """Break a heading that is wider than the cells below it."""
    return "\n".join(
        textwrap.fill(line, max(1, width, *map(len, line.split())), break_long_words=False, break_on_hyphens=False)
        for line in heading.split("\n")
    )
