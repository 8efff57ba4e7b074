"""The comparison of two servers as a terminal table and as JSON. Pure."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conch.machine.facts import MachineFacts
from conch.measure.perf.against import THROUGHPUT, ComparedFigure, Comparison
from conch.measure.perf.plan import PerfPlan
from conch.measure.reports.numbers import duration, significant

if TYPE_CHECKING:
    from rich.table import Table


def side(plan: PerfPlan, sent: str) -> str:
    """Describe one side of a comparison and its requests."""
    return f"'{plan.model}' at {plan.address.shown} over {plan.protocol.upper()}{f', {sent}' if sent else ''}"


def sides(a: PerfPlan, b: PerfPlan, compared: Sequence[Comparison]) -> tuple[str, str]:
    """Describe both sides of a measured comparison."""
    first = next((measured_round for comparison in compared for measured_round in comparison.rounds), None)
    return side(a, first.a[0].sent if first else ""), side(b, first.b[0].sent if first else "")


def table(comparison: Comparison) -> Table:
    """Return a table of every figure of both sides, the ratio B / A, and whether they differ."""
    from rich.table import Table

    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("")
    for heading in ("A", "B", "B / A", "95% range"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for figure in comparison.figures:
        interval = f"{figure.interval.low:.3f} … {figure.interval.high:.3f}" if figure.interval else "–"
        shown.add_row(
            "infer/s" if figure.name == THROUGHPUT else figure.name, _value(figure, figure.a), _value(figure, figure.b),
            f"{figure.ratio:.3f}", interval,
            "disturbed" if comparison.disturbed else "" if figure.differs else "no difference can be told",
            style="dim" if comparison.disturbed else "",
        )  # fmt: skip
    return shown


def json(a: PerfPlan, b: PerfPlan, compared: Sequence[Comparison]) -> str:
    """Return the whole comparison as JSON, with times in seconds."""
    of_a, of_b = sides(a, b, compared)
    document = {
        "a": of_a,
        "b": of_b,
        "batch_size": a.batch_size,
        "machine": asdict(MachineFacts.read()),
        "levels": [_level(a, comparison) for comparison in compared],
    }
    return json_module.dumps(document, indent=2) + "\n"


def _level(plan: PerfPlan, comparison: Comparison) -> dict[str, Any]:
    return {
        "request_rate" if plan.rates is not None else "concurrency": comparison.level,
        "conclusion": comparison.sentence(plan.rates is not None),
        "figures": [asdict(figure) | {"differs": figure.differs} for figure in comparison.figures],
        "rounds": [
            {
                "a": [turn.figures.throughput for turn in measured_round.a],
                "b": [turn.figures.throughput for turn in measured_round.b],
                "disturbed": measured_round.disturbed,
                "counts": measured_round in comparison.counted,
            }
            for measured_round in comparison.rounds
        ],
        "errors": dict(zip("ab", comparison.errors, strict=True)),
        "warnings": list(comparison.warnings),
    }


def _value(figure: ComparedFigure, value: float) -> str:
    return significant(value) if figure.name == THROUGHPUT else duration(value)
