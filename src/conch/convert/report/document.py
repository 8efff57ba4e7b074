"""The report as log lines, Markdown and HTML.  Pure: everything is taken from the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from conch.checkpoints.manifest import Manifest
from conch.convert.measure import by_shape
from conch.convert.report.columns import conditions, headings, notation_of, rows, shapes, title
from conch.convert.report.plot import plot
from conch.convert.verdict import NOT_ASKED_FOR

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1c2330 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .3em .8em; border-bottom: 1px solid #d8dde6 }
th { text-align: left } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr.auto { background: #e8f4ea } tr.refused { color: #9a2b2b } small { color: #5b6575 } svg { max-width: 100% }
"""


def log_lines(manifest: Manifest) -> Iterator[str]:
    """One line a variant and shape: mean, sd, min, max, median, 95p, 99p, in milliseconds."""
    for shape in shapes(manifest):
        for variant in manifest.variants:
            if (run := by_shape(variant.latency).get(shape)) is not None:
                yield (
                    f"[{title(variant)}] {shape}: mean={run.mean_ms:.2f}ms, sd={run.sd_ms:.2f}ms, "
                    f"min={run.min_ms:.2f}ms, max={run.max_ms:.2f}ms, median={run.median_ms:.2f}ms, "
                    f"95p={run.p95_ms:.2f}ms, 99p={run.p99_ms:.2f}ms, runs={run.runs}{', busy' if run.busy else ''}"
                )


def markdown(manifest: Manifest) -> str:
    """The table with what it was measured on."""
    names = headings(manifest)
    rules = ["---", *["---:"] * (len(names) - 4), "---", "---:", "---"]
    lines = [names, rules, *(cells for _, cells in rows(manifest))]
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    facts = "\n".join(f"- {name}: {value}" for name, value in _facts(manifest))
    warnings = "".join(f"**Warning:** {warning}.\n\n" for warning in manifest.warnings)
    return f"# {manifest.source.model}\n\n{facts}\n\n{warnings}{text}\n\n{_legend(manifest)}\n"


def html(manifest: Manifest) -> str:
    """One page that needs nothing else: a plot of the medians, the table, all figures."""
    names = headings(manifest)

    def row(tag: str, cells: Sequence[str], kind: str = "") -> str:
        numbers = range(1, len(names) - 3)
        parts = (
            f"<{tag}{' class=n' if place in numbers else ''}>{escape(cell)}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr{f' class={kind}' if kind else ''}>{''.join(parts)}</tr>"

    body = "\n".join(
        row("td", cells, "auto" if variant.name == manifest.auto else "" if variant.usable else "refused")
        for variant, cells in rows(manifest)
    )
    facts = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in _facts(manifest))
    warnings = "".join(f"<p><b>Warning:</b> {escape(warning)}.</p>\n" for warning in manifest.warnings)
    name = escape(manifest.source.model)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"</head><body>\n<h1>{name}</h1>\n<ul>{facts}</ul>\n{warnings}{_plot(manifest)}\n<table>\n"
        f"{row('th', names)}\n{body}\n"
        f"</table>\n<p><small>{escape(_legend(manifest))}</small></p>\n<h2>All figures</h2>\n<pre>"
        f"{escape(chr(10).join(log_lines(manifest)))}</pre>\n</body></html>\n"
    )


def _plot(manifest: Manifest) -> str:
    series = {
        title(variant): {str(shape): latency.median_ms for shape, latency in sorted(by_shape(variant.latency).items())}
        for variant in manifest.variants
        if variant.latency
    }
    return plot(series, "median latency (ms, logarithmic), by batch x tokens")


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    settings = manifest.settings
    yield "task", manifest.task
    if manifest.source.revision:
        yield "revision", manifest.source.revision
    yield "converted", f"{manifest.created} by conch {manifest.conch}"
    yield "measured on", conditions(manifest)
    tokens = f" of {settings['tokens']} tokens" if "tokens" in settings else ""
    yield "compared on", f"{settings.get('samples', '?')} samples{tokens}, {settings.get('data', 'built-in')}"
    if (problem := settings.get("structured_output", "yes")) != "yes":
        yield "structured output", f"not available on OpenVINO: {problem}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _legend(manifest: Manifest) -> str:
    refused = [
        f"Refused: {variant.name}: {'; '.join(variant.reasons)}."
        for variant in manifest.variants
        if variant.reasons and not variant.usable and variant.reasons != (NOT_ASKED_FOR,)
    ]
    return " ".join([notation_of(manifest).legend, *refused])
