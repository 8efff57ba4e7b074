"""The comparison of two servers as a table, as JSON, and as a report with the ratio of B to A. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from conch import __version__
from conch.machine.facts import MachineFacts
from conch.measure.perf.against import THROUGHPUT, ComparedFigure, Comparison
from conch.measure.perf.plan import PerfPlan
from conch.measure.reports.charts import Axis, Dot, Limit, Series, line_chart
from conch.measure.reports.numbers import milliseconds, significant
from conch.measure.reports.report import (
    Block,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
)
from conch.measure.reports.text import json_text

#: The figures that the chart shows.
_SHOWN: Final = (THROUGHPUT, "p50", "p99")


def side(plan: PerfPlan, sent: str) -> str:
    """Describe one side of a comparison and its requests."""
    return f"'{plan.model}' at {plan.address.shown} over {plan.protocol.upper()}{f', {sent}' if sent else ''}"


def sides(a: PerfPlan, b: PerfPlan, compared: Sequence[Comparison]) -> tuple[str, str]:
    """Describe both sides of a measured comparison."""
    first = next((measured_round for comparison in compared for measured_round in comparison.rounds), None)
    return side(a, first.a[0].sent if first else ""), side(b, first.b[0].sent if first else "")


def level_section(comparison: Comparison, *, open_load: bool) -> Section:
    """Return the comparison at one level: the ratios, what they show, and the warnings."""
    table = comparison_table(comparison, "request rate" if open_load else "concurrency")
    return Section(
        table.caption,
        [
            *([replace(table, caption="")] if table.rows else []),
            Paragraph(comparison.sentence(open_load)),
            *(Note("warning", warning) for warning in comparison.warnings),
        ],
    )


def comparison_table(comparison: Comparison, level: str) -> Table:
    """Return a table of every figure of both sides, the ratio B / A, and whether they differ."""
    rows = []
    for figure in comparison.figures:
        text = significant if figure.name == THROUGHPUT else milliseconds
        low, high = _ends(figure)
        interval = f"{low:.3f} … {high:.3f}" if low is not None and high is not None else None
        name = f"{figure.name} ({'infer/s' if figure.name == THROUGHPUT else 'ms'})"
        differs = "disturbed" if comparison.disturbed else "yes" if figure.differs else "no significant difference"
        rows.append(Row([name, text(figure.a), text(figure.b), figure.ratio, interval, differs],
                        "" if figure.differs and not comparison.disturbed else "muted"))  # fmt: skip
    columns = [
        Column("Figure"), Column("A", True), Column("B", True), Column("B / A", True, "{:.3f}".format),
        Column("95 % range", True), Column("Differs"),
    ]  # fmt: skip
    counted = f"{len(comparison.counted)} of {len(comparison.rounds)} rounds count"
    return Table(f"{level} {comparison.level:g}: {counted}", columns, rows)


def comparison_json(a: PerfPlan, b: PerfPlan, compared: Sequence[Comparison]) -> str:
    """Return the whole comparison as JSON, with times in seconds."""
    of_a, of_b = sides(a, b, compared)
    document = {
        "a": of_a,
        "b": of_b,
        "batch_size": a.batch_size,
        "machine": asdict(MachineFacts.read()),
        "levels": [_level(a, comparison) for comparison in compared],
    }
    return json_text(document)


def _level(plan: PerfPlan, comparison: Comparison) -> dict[str, Any]:
    return {
        "request_rate" if plan.rates is not None else "concurrency": comparison.level,
        "conclusion": comparison.sentence(plan.rates is not None),
        "figures": [asdict(figure) | {"differs": figure.differs} for figure in comparison.figures],
        "rounds": [
            {
                "a": [measurement.figures.throughput for measurement in measured_round.a],
                "b": [measurement.figures.throughput for measurement in measured_round.b],
                "disturbed": measured_round.disturbed,
                "counts": measured_round in comparison.counted,
            }
            for measured_round in comparison.rounds
        ],
        "errors": dict(zip("ab", comparison.errors, strict=True)),
        "warnings": list(comparison.warnings),
    }


def comparison_report(a: PerfPlan, b: PerfPlan, command: str, compared: Sequence[Comparison]) -> Report:
    """Return the report; ``command`` reproduces the comparison."""
    open_load = a.rates is not None
    level = "requests/s" if open_load else "concurrency"
    warnings = [
        Note("warning", f"{level} {comparison.level:g}: {text}.")
        for comparison in compared
        for text in comparison.warnings
    ]
    blocks: list[Block] = [*_chart(compared, level), *(comparison_table(comparison, level) for comparison in compared)]
    lead = " ".join(f"At {level} {comparison.level:g}: {comparison.sentence(open_load)}." for comparison in compared)
    rounds = "A, B, B, A: each gives a ratio, and the mean of the ratios counts, with its 95 % range"
    of_a, of_b = sides(a, b, compared)
    facts = [("A", of_a), ("B", of_b), ("machine of the senders", str(MachineFacts.read())), ("rounds", rounds)]
    return Report(
        f"{a.model} compared" if a.model == b.model else f"{a.model} and {b.model} compared",
        lead,
        [
            Section("B compared with A", blocks),
            Section("Sides and machine", [Properties(facts)]),
            Section("How to reproduce", [CodeBlock(command)]),
        ],
        warnings,
        f"Written by conch {__version__}.",
    )


def _chart(compared: Sequence[Comparison], level: str) -> Iterator[Block]:
    series = [
        Series(
            name,
            [
                Dot(comparison.level, figure.ratio, "", *_ends(figure))
                for comparison in compared
                for figure in comparison.figures
                if figure.name == name
            ],
        )
        for name in _SHOWN
    ]
    disturbed = ", ".join(f"{level} {comparison.level:g}" for comparison in compared if comparison.disturbed)
    if len(compared) > 1 and any(line.dots for line in series):
        yield line_chart(
            "B over A",
            series,
            Axis(level, zero=False),
            Axis("ratio (times)", zero=False),
            alt="; ".join(f"at {level} {comparison.level:g}: {comparison.sentence()}" for comparison in compared) + ".",
            caption="Above 1 B has the higher throughput, or the longer latency; bars are 95 % ranges."
            + (f" Other processes used the machine at {disturbed}." if disturbed else ""),
            limits=[Limit("y", 1.0, "equal")],
        )


def _ends(figure: ComparedFigure) -> tuple[float | None, float | None]:
    return (figure.interval.low, figure.interval.high) if figure.interval is not None else (None, None)
