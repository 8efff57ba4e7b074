"""Renders a report as one HTML page with all styles, scripts, charts and figures, so that it loads nothing.

Each chart is included twice: as an image, for paper and readers without scripts, and as a specification that the script
draws when it becomes visible. A content security policy prevents any text in the page from loading anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, Final
from zlib import crc32

from conch.machine.extras import load
from conch.measure.reports.charts import chart_config
from conch.measure.reports.report import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
    Tiles,
)  # fmt: skip

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
)
#: Tables with more columns are set in smaller type.
_DENSE: Final = 10
_KINDS: Final = {"info": "", "warning": "Warning: ", "error": "Error: "}
#: The definitions of gradients and clips in an image, and references to them.
_NAMED: Final = re.compile(r'<(?:\w+Gradient|clipPath|pattern)\b[^>]*? id="|="url\(#')


def html(report: Report) -> str:
    """Return the report as HTML; raises UNSUPPORTED if it has charts and vl-convert is missing."""
    anchors = anchors_of(report.sections)
    blocks = [*report.opening, *(block for section in report.sections for block in section.blocks)]
    has_charts = any(isinstance(block, Chart) for block in blocks)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.title)}</title>\n<style>\n{_asset('page.css')}</style></head>\n<body>\n<header>",
        f'<h1>{escape(report.title)}</h1>\n<p class="lead">{escape(report.lead)}</p>\n',
        *_blocks(report.opening),
        *(_contents(report.sections, anchors) if len(report.sections) > 2 else ()),
        "</header>\n<main>",
        *(
            f'<section id="{anchor}">\n<h2>{escape(section.title)}</h2>\n{"".join(_blocks(section.blocks))}</section>\n'
            for section, anchor in zip(report.sections, anchors, strict=True)
        ),
        "</main>\n",
        f"<footer>{escape(report.footer)}</footer>\n" if report.footer else "",
        *(f"<script>{part}</script>\n" for part in (_bundle(),) if has_charts),
        f'<script type="application/json" id="chart-configs">{_json(_configs())}</script>\n',
        f"<script>\n{_asset('page.js')}</script>\n</body></html>\n",
    ]
    return "".join(parts)


def anchors_of(sections: Sequence[Section]) -> list[str]:
    """Return the anchors of sections: their own, or ones made from their numbers."""
    return [escape(section.anchor or f"section-{number}") for number, section in enumerate(sections, 1)]


def _contents(sections: Sequence[Section], anchors: Sequence[str]) -> Iterator[str]:
    yield '<nav aria-label="Contents"><ul>'
    for section, anchor in zip(sections, anchors, strict=True):
        if section.listed:
            yield f'<li><a href="#{anchor}">{escape(section.title)}</a></li>'
    yield "</ul></nav>\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for narrow, together in groupby(blocks, lambda block: isinstance(block, Chart) and not block.wide):
        if narrow:
            yield f'<div class="charts">{"".join(map(_block, together))}</div>\n'
        else:
            yield from map(_block, together)


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{escape(text)}</p>\n"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>\n"
        case Note(kind, text):
            return f'<div class="note {kind}" role="note"><p><b>{_KINDS[kind]}</b>{escape(text)}</p></div>\n'
        case Tiles(items):
            tiles = "".join(
                f'<div class="tile {tile.tone}"><span>{escape(tile.label)}</span><b>{escape(tile.value)}</b>'
                f"<span>{escape(tile.detail)}</span></div>"
                for tile in items
            )
            return f'<div class="tiles">{tiles}</div>\n'
        case Properties(items):
            return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in items)}</dl>\n"
        case CodeBlock(text, caption):
            above = f"<p>{escape(caption)}</p>" if caption else ""
            return f'<div class="pre">{above}<pre><code>{escape(text)}</code></pre></div>\n'
        case Table():
            return _table(block)
        case Chart():
            return _chart(block)


def _table(table: Table) -> str:
    classes = [' class="n"' if column.number else "" for column in table.columns]
    dense = ' class="dense"' if len(table.columns) > _DENSE else ""
    headings = "".join(
        f'<th scope="col"{kind}>{escape(column.heading)}</th>'
        for column, kind in zip(table.columns, classes, strict=True)
    )
    rows = "\n".join(_row(row, table.texts(row), classes) for row in table.rows)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(table.caption)}"><table{dense}>\n'
        f"<caption>{escape(table.caption)}</caption>\n<thead><tr>{headings}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table></div>\n"
    )


def _row(row: Row, texts: Sequence[str], classes: Sequence[str]) -> str:
    cells = [escape(text) for text in texts]
    if row.target:
        cells[0] = f'<a href="#{escape(row.target)}">{cells[0]}</a>'
    tone = f' class="{row.tone}"' if row.tone else ""
    return f"<tr{tone}>{''.join(f'<td{kind}>{cell}</td>' for cell, kind in zip(cells, classes, strict=True))}</tr>"


def _chart(chart: Chart) -> str:
    converter = load("A report with charts", "vl_convert")
    still = converter.vegalite_to_svg(dict(chart.spec), config=chart_config(dark=False, wide=chart.wide))
    below = f'<p class="below">{escape(chart.caption)}</p>' if chart.caption else ""
    return (
        f'<figure role="group" aria-label="{escape(chart.title)}"><figcaption><b>{escape(chart.title)}</b></figcaption>'
        f'<div class="still" role="img" aria-label="{escape(chart.alt)}">{_still(still)}</div>'
        f'<div class="drawn" role="img" aria-label="{escape(chart.alt)}"></div>'
        f'<script type="application/json">{_json(chart.spec)}</script>{below}</figure>\n'
    )


def _still(svg: str) -> str:
    """Return an image whose gradients and clips have unique names.

    All images and the charts drawn by the script use the same names: a reference could find the gradient of another
    image, or of a hidden one, and draw nothing.
    """
    own = f"still{crc32(svg.encode()):x}-"
    return _NAMED.sub(lambda match: match[0] + own, svg)


def _configs() -> dict[str, Any]:
    return {"light": chart_config(dark=False), "dark": chart_config(dark=True)}


def _json(value: Any) -> str:
    """Return JSON that cannot end the element around it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _asset(name: str) -> str:
    return files("conch.measure.reports").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    """Return Vega, Vega-Lite and the code that embeds them, once for all charts."""
    bundle: str = load("A report with charts", "vl_convert").javascript_bundle()
    return bundle.replace("</script", "<\\/script")
