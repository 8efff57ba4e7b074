"""Renders reports as Markdown, tables as CSV, and the data behind reports as JSON. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from conch.measure.reports.report import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Note,
    Paragraph,
    Properties,
    Report,
    Section,
    Table,
    Tiles,
)


def csv_text(table: Table) -> str:
    """Return a table as CSV: the headings, then the values of the cells, unformatted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.heading for column in table.columns])
    writer.writerows(row.cells for row in table.rows)
    return out.getvalue()


def json_text(document: Any) -> str:
    """Return a document of figures as indented JSON."""
    return json.dumps(document, indent=2) + "\n"


def markdown(report: Report) -> str:
    """Return a report as Markdown; a chart is replaced by its description."""
    parts = [f"# {report.title}", report.lead, *_blocks(report.opening), *_sections(report.sections), report.footer]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(table: Table) -> str:
    """Return a table as Markdown, without its caption."""
    rules = ["---:" if column.number else "---" for column in table.columns]
    lines = [[column.heading for column in table.columns], rules, *map(table.texts, table.rows)]
    return "".join(f"| {' | '.join(map(_cell, cells))} |\n" for cells in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sections(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        yield f"## {section.title}"
        yield from _blocks(section.blocks)


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Paragraph(text):
                yield text
            case Bullets(items):
                yield "\n".join(f"- {item}" for item in items)
            case Note(kind, text):
                yield f"**{kind.capitalize()}:** {text}"
            case Tiles(items):
                yield "\n".join(f"- {tile}" for tile in items)
            case Properties(items):
                yield "\n".join(f"- {name}: {value}" for name, value in items)
            case CodeBlock(text, caption):
                yield from filter(None, (caption, f"```text\n{text}\n```"))
            case Table(caption):
                yield from filter(None, (caption, markdown_table(block).rstrip("\n")))
            case Chart(title, _, alt):
                yield f"{title}: {alt}"
