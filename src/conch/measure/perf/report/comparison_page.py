"""The HTML page of a comparison: the ratio of B to A, and its confidence interval. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conch import __version__
from conch.machine.facts import MachineFacts
from conch.measure.perf.against import THROUGHPUT, ComparedFigure, Comparison
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report.comparison import sides
from conch.measure.reports.charts import Axis, Dot, Limit, Series, line_chart
from conch.measure.reports.numbers import NONE, milliseconds, significant
from conch.measure.reports.page import Block, CodeBlock, Column, Note, Page, Properties, Row, Section, Table

#: The figures that the chart shows.
_SHOWN = (THROUGHPUT, "p50", "p99")


def comparison_page(a: PerfPlan, b: PerfPlan, command: str, compared: Sequence[Comparison], machine: str) -> Page:
    """Return the report; ``machine`` describes the senders' machine."""
    open_load = a.rates is not None
    level = "requests/s" if open_load else "concurrency"
    warnings = [
        Note("warning", f"{level} {comparison.level:g}: {text}.")
        for comparison in compared
        for text in comparison.warnings
    ]
    blocks: list[Block] = [*_chart(compared, level), *(_table(comparison, level) for comparison in compared)]
    lead = " ".join(f"At {level} {comparison.level:g}: {comparison.sentence(open_load)}." for comparison in compared)
    rounds = "A, B, B, A: each gives a ratio, and the mean of the ratios counts, with its 95 % range"
    of_a, of_b = sides(a, b, compared)
    facts = [("A", of_a), ("B", of_b), ("machine of the senders", machine), ("rounds", rounds)]
    return Page(
        f"{a.model} compared" if a.model == b.model else f"{a.model} and {b.model} compared",
        lead,
        [
            Section("B beside A", blocks),
            Section("Sides and machine", [Properties(facts)]),
            Section("How to reproduce", [CodeBlock(command)]),
        ],
        warnings,
        f"Written by conch {__version__}.",
    )


def this_machine() -> str:
    """Describe the senders' machine."""
    return str(MachineFacts.read())


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


def _table(comparison: Comparison, level: str) -> Table:
    rows = []
    for figure in comparison.figures:
        shown = significant if figure.name == THROUGHPUT else milliseconds
        low, high = _ends(figure)
        interval = f"{low:.3f} – {high:.3f}" if low is not None and high is not None else NONE
        name = f"{figure.name} ({'infer/s' if figure.name == THROUGHPUT else 'ms'})"
        told = "disturbed" if comparison.disturbed else "yes" if figure.differs else "no difference can be told"
        rows.append(Row([name, shown(figure.a), shown(figure.b), f"{figure.ratio:.3f}", interval, told],
                        "" if figure.differs and not comparison.disturbed else "muted"))  # fmt: skip
    headings = (("Figure", False), ("A", True), ("B", True), ("B / A", True), ("95 % range", True), ("Differs", False))
    return Table(
        f"{level} {comparison.level:g}: {len(comparison.counted)} of {len(comparison.rounds)} rounds count",
        [Column(heading, number=number) for heading, number in headings],
        rows,
    )
