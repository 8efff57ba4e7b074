"""What a report consists of: text, figures, tables and charts, in sections.  Pure data.

All texts are plain: the writers escape them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: How a row or a figure stands out: the best or chosen one, one with a fault, one that counts less.
Tone = Literal["", "good", "bad", "muted"]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences that each stand alone."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence not to be missed: ``warning`` casts doubt on figures, ``error`` says that some are missing."""

    kind: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure in large type, as ``71.9 infer/s`` over ``throughput``; ``detail`` is what to compare it with."""

    value: str
    label: str
    detail: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The figures that matter most, side by side; more than six are too many."""

    items: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Properties:
    """Names and what they stand for, in two columns."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """Commands, a configuration or a message, shown as it is; ``caption`` says what it is for."""

    text: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, with the unit of what is below it; numbers stand at the right."""

    heading: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The cells below the columns.  ``target`` is the anchor of a section that the first cell leads to."""

    cells: Sequence[str]
    tone: Tone = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below columns; ``caption`` says what they show.  HTML can be sorted by each column."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as a specification of Vega-Lite, made by :mod:`conch.reports.charts`.

    ``alt`` says in words what it shows, for those who cannot see it; ``caption`` is below it.  Two that are not
    ``wide`` stand side by side.
    """

    title: str
    spec: Mapping[str, Any]
    alt: str
    caption: str = ""
    wide: bool = True


Block = Paragraph | Bullets | Note | Tiles | Properties | CodeBlock | Table | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks below a heading; ``anchor`` is a name for links to it, by default made of its place.

    Those that are not ``listed`` are left out of the contents, as one of many that a table leads to.
    """

    title: str
    blocks: Sequence[Block]
    anchor: str = ""
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """A report: what it is about, the result in a sentence, what must be known first (``opening``), and sections.

    ``footer`` says what wrote it, and when.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    opening: Sequence[Block] = field(default=())
    footer: str = ""
