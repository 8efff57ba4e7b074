"""The elements of a report: text, figures, tables and charts, in sections. Pure data.

All texts are plain: the writers escape them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column, with the unit of its values; numbers are aligned to the right."""

    heading: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row. ``target`` is the anchor of the section that the first cell links to."""

    cells: Sequence[str]
    tone: Tone = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, which can be sorted by each column in HTML; ``caption`` describes its rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]


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

    A section that is not ``listed`` is left out of the contents, such as one of many that a table links to.
    """

    title: str
    blocks: Sequence[Block]
    anchor: str = ""
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """A report: title, result in a sentence (``lead``), important notes (``opening``), and sections.

    ``footer`` names the program that wrote it.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    opening: Sequence[Block] = field(default=())
    footer: str = ""
