"""The elements of a report: text, figures, tables and charts, in sections. Pure data.

Commands build this data; there is one renderer for each output: :mod:`conch.measure.reports.html`,
:mod:`conch.measure.reports.terminal`, and :mod:`conch.measure.reports.text` (Markdown and CSV). All texts are plain:
renderers escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from conch.measure.reports.numbers import NONE

#: The emphasis of a row or figure: best or chosen, faulty, or less important.
Tone = Literal["", "good", "bad", "muted"]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of sentences."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A bulleted list of independent sentences."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A prominent sentence: a ``warning`` casts doubt on figures, an ``error`` reports missing ones."""

    kind: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure in large type, such as ``71.9 infer/s`` over ``throughput``; ``detail`` is a value for comparison."""

    value: str
    label: str
    detail: str = ""
    tone: Tone = ""

    def __str__(self) -> str:
        return f"{self.label}: {self.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Tiles:
    """The most important figures, side by side; at most six are readable."""

    items: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Properties:
    """Names and values in two columns."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A command, configuration or message, shown verbatim; ``caption`` describes its purpose."""

    text: str
    caption: str = ""


#: A value of a table: text, a number, or None if it is missing.
Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading with the unit, and the ``format`` of its numbers, which CSV does not use.

    A column of numbers (``number``) is aligned to the right, and its cells are not wrapped. On a terminal that is too
    narrow for the table, ``short`` replaces the heading, and ``narrow`` decides whether the column is kept, hidden, or
    stacked: each of its cells is then below the one to its left.
    """

    heading: str
    number: bool = False
    format: Callable[[Any], str] = str
    short: str = ""
    narrow: Literal["keep", "hide", "stack"] = "keep"

    def text(self, cell: Cell) -> str:
        """Return a cell as text."""
        return NONE if cell is None else cell if isinstance(cell, str) else self.format(cell)


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row. ``target`` is the anchor of the section that the first cell links to."""

    cells: Sequence[Cell]
    tone: Tone = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, which can be sorted by each column in HTML; ``caption`` describes its rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    @classmethod
    def of(cls, headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
        """Return a table of texts and unformatted numbers."""
        return cls("", [Column(heading) for heading in headings], [Row(cells) for cells in rows])

    def texts(self, row: Row) -> list[str]:
        """Return the cells of a row as text."""
        return [column.text(cell) for column, cell in zip(self.columns, row.cells, strict=True)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as a Vega-Lite specification, made by :mod:`conch.measure.reports.charts`.

    ``alt`` describes the chart for readers who cannot see it; ``caption`` is shown below it. Two charts that are not
    ``wide`` are shown side by side.
    """

    title: str
    spec: Mapping[str, Any]
    alt: str
    caption: str = ""
    wide: bool = True


Block = Paragraph | Bullets | Note | Tiles | Properties | CodeBlock | Table | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks below a heading; ``anchor`` is the name for links to it, by default made from its number.

    A section that is not ``listed`` is omitted from the contents, for example if it is one of many that a table links
    to.
    """

    title: str
    blocks: Sequence[Block]
    anchor: str = ""
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """A report: title, result in a sentence (``lead``), important notes (``opening``), and sections.

    ``footer`` names the program that wrote it.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    opening: Sequence[Block] = field(default=())
    footer: str = ""
