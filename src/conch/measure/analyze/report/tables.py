"""The tables of an analysis. Pure.

Headings are those of model analyzer's reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from conch.measure.analyze.report.analysis import (
    Analysis,
    ConfigTraits,
    Placed,
    memory_of,
    other_changes,
    traits_of,
    utilisation_of,
)
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.reports.numbers import NONE, megabytes, milliseconds, significant
from conch.measure.reports.report import Column, Row, Table, Tone

STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")
#: Separates the figures of several models in a cell.
_BETWEEN: Final = " / "

_TEXTUAL: Final = ("Model Config Name", "Dynamic Batching", "Total Instance Count", "Preferred Sizes", "Also Changed")
#: Columns that narrow terminals do not show.
_ONLY_WIDE: Final = ("Dynamic Batching", "Average GPU Utilization (%)", "Average CPU Usage (cores)")
#: Headings on narrow terminals.
_SHORT: Final = {
    "Model Config Name": "config", "Max Batch Size": "max batch", "Preferred Sizes": "preferred",
    "Queue Delay (µs)": "delay µs", "Also Changed": "also", "Total Instance Count": "inst.", "Concurrency": "conc.",
    "Request Rate": "rate", "p99 Latency (ms)": "p99 ms", "Throughput (infer/sec)": "infer/s",
    "Max GPU Memory Usage (MB)": "GPU MB", "Max CPU Memory Usage (MB)": "CPU MB",
}  # fmt: skip

_Cell = Callable[[Placed], str]


def ranking_table(analysis: Analysis, placed: Sequence[Placed], *, targets: bool = False) -> Table:
    """Return the candidates with the figures of their best points; with ``targets``, names link to their sections."""
    columns = _columns(analysis)
    rows = [
        Row(
            [cell(candidate) for _, cell in columns],
            _tone(good=candidate is analysis.recommended, muted=candidate.disturbed or not candidate.satisfied),
            candidate.name if targets else "",
        )
        for candidate in placed
    ]
    return Table(
        "Configurations, the best first, each at its best load",
        [
            Column(
                heading,
                heading not in _TEXTUAL,
                short=_SHORT.get(heading, ""),
                narrow="hide" if heading in _ONLY_WIDE else "keep",
            )
            for heading, _ in columns
        ],
        rows,
    )


def _columns(analysis: Analysis) -> list[tuple[str, _Cell]]:
    gpus = analysis.has_gpus

    def trait(write: Callable[[ConfigTraits], str]) -> _Cell:
        return lambda candidate: _BETWEEN.join(
            dict.fromkeys(write(traits_of(candidate.result, model, gpus=gpus)) for model in analysis.models)
        )

    def figure(write: Callable[[ModelFigures], str]) -> _Cell:
        return lambda candidate: _BETWEEN.join(
            write(candidate.point.models[model])
            for model in analysis.models
            if candidate.point and model in candidate.point.models
        ) or NONE  # fmt: skip

    def point(write: Callable[[Point], str]) -> _Cell:
        return lambda candidate: write(candidate.point) if candidate.point is not None else NONE

    level = "Concurrency" if analysis.load_kind == "concurrency" else "Request Rate"
    optional: list[tuple[str, _Cell]] = [
        ("Preferred Sizes", trait(lambda traits: ", ".join(map(str, traits.preferred)))),
        ("Queue Delay (µs)", trait(lambda traits: str(traits.delay or ""))),
        (
            "Also Changed",
            lambda candidate: "; ".join(filter(None, (other_changes(candidate.result, m) for m in analysis.models))),
        ),
    ]
    return [
        ("Model Config Name", lambda candidate: candidate.name),
        ("Max Batch Size", trait(lambda traits: str(traits.max_batch_size))),
        ("Dynamic Batching", trait(lambda traits: "Enabled" if traits.batching else "Disabled")),
        *((heading, cell) for heading, cell in optional if len({cell(candidate) for candidate in analysis.placed}) > 1),
        ("Total Instance Count", trait(lambda traits: traits.instance_text)),
        (level, point(lambda best: f"{best.load:g}{disturbed_mark(best)}")),
        ("p99 Latency (ms)", figure(lambda figures: milliseconds(figures.percentiles.get(99)))),
        ("Throughput (infer/sec)", figure(lambda figures: significant(figures.throughput))),
        *_resources(gpus, point),
    ]


def _resources(gpus: bool, point: Callable[[Callable[[Point], str]], _Cell]) -> list[tuple[str, _Cell]]:
    if gpus:
        return [
            ("Max GPU Memory Usage (MB)", point(lambda point: megabytes(memory_of(point)))),
            ("Average GPU Utilization (%)", point(lambda point: _hundred(utilisation_of(point)))),
        ]
    return [
        ("Max CPU Memory Usage (MB)", point(lambda point: megabytes(memory_of(point)))),
        (
            "Average CPU Usage (cores)",
            point(lambda point: significant(point.resources.cores if point.resources else None)),
        ),
    ]


def load_table(analysis: Analysis, candidate: Placed) -> Table:
    """Return the points of a candidate, the highest load first: client latency, server stages and resources."""
    several = len(analysis.models) > 1
    gpus = analysis.has_gpus
    level = "Request Concurrency" if analysis.load_kind == "concurrency" else "Request Rate"
    headings = [
        level, *(["Model"] if several else []), "p99 Latency (ms)", "Client Response Wait (ms)", "Server Queue (ms)",
        "Server Compute Input (ms)", "Server Compute Infer (ms)", "Throughput (infer/sec)",
        *(
            ["Max GPU Memory Usage (MB)", "Average GPU Utilization (%)"] if gpus
            else ["Max CPU Memory Usage (MB)", "Average CPU Usage (cores)"]
        ),
        "Failed",
    ]  # fmt: skip
    rows = []
    points = candidate.result.points
    for point in sorted(points, key=lambda point: -point.load):
        used = point.resources
        for model, figures in point.models.items():
            mark = disturbed_mark(point) + ("†" if point.stopped else "")
            rows.append(
                Row(
                    [
                        f"{point.load:g}{mark}",
                        *([model] if several else []),
                        milliseconds(figures.percentiles.get(99)),
                        milliseconds(figures.client_wait),
                        *(milliseconds(figures.stages.get(stage)) for stage in STAGES[:3]),
                        significant(figures.throughput),
                        megabytes(memory_of(point)),
                        _hundred(utilisation_of(point)) if gpus else significant(used.cores if used else None),
                        str(figures.failed),
                    ],
                    _tone(
                        bad=bool(figures.failed),
                        muted=point.disturbed,
                        good=point == candidate.point and candidate.satisfied,
                    ),
                )
            )
    marks = [
        *(["* other processes used the machine"] if any(point.disturbed for point in points) else []),
        *(["† ended early, because it was clearly worse"] if any(point.stopped for point in points) else []),
    ]
    caption = f"{candidate.name} by load" + (f" ({'; '.join(marks)})" if marks else "")
    return Table(caption, [Column(heading, number=heading != "Model") for heading in headings], rows)


def disturbed_mark(point: Point) -> str:
    """Return an asterisk for a disturbed point."""
    return "*" if point.disturbed else ""


def _tone(*, good: bool, muted: bool, bad: bool = False) -> Tone:
    return "bad" if bad else "muted" if muted else "good" if good else ""


def _hundred(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"
