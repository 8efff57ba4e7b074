"""The report of an analysis: result, ranking, charts, and a section per configuration; its summary. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from conch.measure.analyze.report.analysis import Analysis, Placed, load_text, memory_of, slowest, utilisation_of
from conch.measure.analyze.report.tables import STAGES, disturbed_mark, load_table, ranking_table
from conch.measure.analyze.report.words import doubts, headline, missing, reasons, title
from conch.measure.analyze.results import Point
from conch.measure.reports.charts import Axis, Bar, Dot, Limit, Series, bar_chart, line_chart
from conch.measure.reports.numbers import bytes_of, duration, percent, significant
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
    Tile,
    Tiles,
    Tone,
)

#: Number of configurations in the summary, with curves, and with their own sections (the default always has one).
_RANKED: Final = 10
_CURVES: Final = 3
_DETAILS: Final = 12
_STAGE_NAMES: Final = {
    "queue": "server queue", "compute_input": "server compute input", "compute_infer": "server compute infer",
    "compute_output": "server compute output",
}  # fmt: skip


def report(analysis: Analysis) -> Report:
    """Return the whole report; charts need the extra ``report``."""
    detailed = _with_default(analysis, analysis.measured[:_DETAILS])
    sections = [
        *_ranking(analysis, detailed),
        *_charts(analysis),
        *_missing(analysis),
        *_machine(analysis),
        *_commands(analysis),
        *(_details(analysis, candidate) for candidate in detailed),
    ]
    opening: list[Block] = [Note("warning", text) for text in doubts(analysis)]
    if not analysis.measured:
        opening.insert(0, Note("error", "There is no valid measurement. All results follow."))
    opening += _tiles(analysis)
    why = list(reasons(analysis))
    if why:
        opening.append(Bullets(why))
    return Report(title(analysis), headline(analysis), sections, opening)


def summary(analysis: Analysis) -> Iterator[Block | Section]:
    """Yield the result for a terminal: the best configurations, the reasons and the doubts."""
    if analysis.measured:
        table = ranking_table(analysis, analysis.measured[:_RANKED])
        yield replace(table, caption=f"{', '.join(analysis.models)}: {analysis.goal}")
        if (rest := len(analysis.measured) - _RANKED) > 0:
            yield Paragraph(f"and {rest} more")
    blocks: list[Block] = [Bullets(list(reasons(analysis))), *(Note("warning", text) for text in doubts(analysis))]
    yield Section(headline(analysis), blocks)
    if lines := list(missing(analysis)):
        yield Section("Missing and failed measurements", [Bullets(lines)])
    if analysis.apply and analysis.advice == "use":
        yield CodeBlock(analysis.apply, "To use it:")


def _ranking(analysis: Analysis, detailed: Sequence[Placed]) -> Iterator[Section]:
    if not analysis.measured:
        return
    shown = {candidate.name for candidate in detailed}
    table = ranking_table(analysis, analysis.measured, targets=True)
    rows = [row if row.target in shown else replace(row, target="") for row in table.rows]
    yield Section(
        "Ranking",
        [
            Paragraph(f"Goal: {analysis.goal}."),
            replace(table, rows=rows),
            *([Paragraph(text)] if (text := " ".join(_about_grey(analysis))) else []),
        ],
        "ranking",
    )


def _about_grey(analysis: Analysis) -> Iterator[str]:
    """Yield the reasons for grey rows in the ranking."""
    if not all(candidate.satisfied for candidate in analysis.measured):
        yield "Grey rows do not satisfy the constraints."
    if any(candidate.disturbed for candidate in analysis.measured):
        yield "Other processes used the machine while those with an asterisk were measured."


def _tiles(analysis: Analysis) -> list[Block]:
    """Return tiles with the figures of the best configuration and the default.

    Disturbed figures and unproven ratios are omitted.
    """
    best, default, final = analysis.best, analysis.default, analysis.comparison
    if best is None or best.point is None or analysis.disturbed:
        return []
    point = final.winner if final is not None else best.point
    other = final.default if final is not None else default.point if default is not None else None
    if best.is_default or (other is not None and other.disturbed):
        other = None
    figures, before = slowest(point), slowest(other) if other is not None else None
    beside = f"default: {significant(other.throughput)}" if other is not None else load_text(analysis, point.load)
    tone: Tone = "good" if best is analysis.recommended else "muted"
    tiles = [Tile(f"{significant(point.throughput)} infer/s", "throughput", beside, tone)]
    if other is not None and other.throughput and analysis.advice == "use":
        ratio = significant(point.throughput / other.throughput, 2)
        tiles.insert(0, Tile(f"{ratio} ×", "the default's throughput", f"with {best.name}"))
    if figures is not None:
        than = f"default: {duration(before.percentiles.get(99))}" if before is not None else ""
        tiles.append(Tile(duration(figures.percentiles.get(99)), "p99 latency", than))
    memory = memory_of(point)
    if memory is not None:
        than = f"default: {bytes_of(memory_of(other))}" if other is not None else ""
        tiles.append(Tile(bytes_of(memory), "GPU memory" if analysis.has_gpus else "memory", than))
    busy = utilisation_of(point)
    if busy is not None:
        tiles.append(Tile(percent(busy), "average GPU utilisation"))
    elif point.resources is not None:
        tiles.append(Tile(significant(point.resources.cores), "processor cores used"))
    return [Tiles(tiles)]


def _charts(analysis: Analysis) -> Iterator[Section]:
    if not analysis.measured:
        return
    yield Section("Latency, throughput and memory", [*_curves(analysis), *_memory(analysis)], "charts")


def _curves(analysis: Analysis) -> Iterator[Chart]:
    chosen = _with_default(analysis, analysis.measured[:_CURVES])
    series = [
        Series(
            candidate.name,
            [
                Dot(point.throughput, 1e3 * figures.percentiles.get(99, 0.0), f"{point.load:g}{disturbed_mark(point)}")
                for point in sorted(candidate.result.points, key=lambda point: point.load)
                if (figures := slowest(point)) is not None and figures.requests
            ],
        )
        for candidate in chosen
    ]
    ends = "; ".join(
        f"{candidate.name} reaches {significant(max(point.throughput for point in candidate.result.points))} infer/s"
        for candidate in chosen
    )
    several = " of the slowest model" if len(analysis.models) > 1 else ""
    disturbed = any(point.disturbed for candidate in chosen for point in candidate.result.points)
    limits = []
    if analysis.latency_limit is not None:
        limits.append(Limit("y", 1e3 * analysis.latency_limit, f"maximum {duration(analysis.latency_limit)}"))
    what, labelled = "concurrency" if analysis.load_kind == "concurrency" else "request rate", len(chosen) <= 2
    yield line_chart(
        "Latency against throughput",
        series,
        Axis("throughput (infer/s)"),
        Axis(f"p99 latency{several} (ms)", logarithmic=True),
        alt=f"p99 latency by throughput: {ends}.",
        caption="Better is to the right and below. "
        + (f"Numbers beside the marks are the {what}." if labelled else f"Each mark is a {what}; point at it to see.")
        + (" An asterisk marks measurements during which other processes used the machine." if disturbed else ""),
        labels=labelled,
        limits=limits,
    )


def _memory(analysis: Analysis) -> Iterator[Chart]:
    groups: dict[str, list[Dot]] = {}
    for measurement in analysis.measured:
        assert measurement.point is not None
        memory = memory_of(measurement.point)
        if memory is None:
            continue
        kind = (
            "best" if measurement is analysis.recommended else "default" if measurement.is_default
            else "satisfy the constraints" if measurement.satisfied else "do not satisfy the constraints"
        )  # fmt: skip
        groups.setdefault(kind, []).append(Dot(memory / 1e6, measurement.point.throughput, measurement.name))
    if not groups:
        return
    order = ("best", "default", "satisfy the constraints", "do not satisfy the constraints")
    where = "GPU memory" if analysis.has_gpus else "memory"
    dots = [dot for group in groups.values() for dot in group]
    minimum, maximum = min(dot.x for dot in dots), max(dot.x for dot in dots)
    yield line_chart(
        f"Throughput against {where}",
        [Series(kind, groups[kind]) for kind in order if kind in groups],
        Axis(f"{where} at most (MB)", zero=False),
        Axis("throughput (infer/s)"),
        alt=f"{len(dots)} configurations take {significant(minimum)} to {significant(maximum)} MB.",
        caption="Each mark is a configuration at its best load; better is to the left and above.",
        joined=False,
    )


def _missing(analysis: Analysis) -> Iterator[Section]:
    lines = list(missing(analysis))
    if lines:
        yield Section("Missing and failed measurements", [Bullets(lines)], "missing")


def _machine(analysis: Analysis) -> Iterator[Section]:
    facts = [*([("server", analysis.server)] if analysis.server else []), *analysis.machine, *analysis.settings]
    if facts:
        yield Section("Machine and settings", [Properties(facts)], "machine")


def _commands(analysis: Analysis) -> Iterator[Section]:
    blocks = []
    if analysis.reproduce:
        blocks.append(CodeBlock(analysis.reproduce, "To repeat the measurement:"))
    if analysis.apply and analysis.best is not None and analysis.advice == "use":
        blocks.append(CodeBlock(analysis.apply, f"To use {analysis.best.name} (shows the change):"))
    if blocks:
        yield Section("How to reproduce and to apply", blocks, "commands")


def _details(analysis: Analysis, candidate: Placed) -> Section:
    blocks: list[Block] = []
    if candidate.broken:
        blocks.append(Note("info", f"Violates the constraints: {'; '.join(candidate.broken)}."))
    warnings = dict.fromkeys(
        f"{load_text(analysis, point.load)}: {warning}"
        for point in candidate.result.points
        for warning in point.warnings
    )
    blocks += [Note("warning", f"{warning}.") for warning in warnings]
    blocks += [load_table(analysis, candidate), *_stages(analysis, candidate)]
    if candidate.result.candidate.overrides:
        changed = json.dumps(candidate.result.candidate.overrides, indent=2)
        blocks.append(CodeBlock(changed, "Changes to the configurations, by model:"))
    return Section(candidate.name, blocks, candidate.name, listed=False)


def _stages(analysis: Analysis, candidate: Placed) -> Iterator[Chart]:
    for model in analysis.models:
        bars: list[Bar] = []
        points = [point for point in candidate.result.points if model in point.models and point.models[model].requests]
        for point in sorted(points, key=lambda point: point.load):
            bars += _bars(point, model, f"{point.load:g}")
        if not bars:
            continue
        of = f" of {model}" if len(analysis.models) > 1 else ""
        longest = max(points, key=lambda point: point.load).models[model]
        largest = max(longest.stages, key=lambda stage: longest.stages[stage], default="")
        largest_share = f" and is mostly {_STAGE_NAMES.get(largest, largest)}" if largest else ""
        yield bar_chart(
            f"{candidate.name}: where the time goes{of}",
            bars,
            Axis("average time of a request (ms)"),
            alt=f"At the highest load a request takes {duration(longest.average)} on average{largest_share}.",
            caption="Network is the part of the latency that the server does not account for.",
            stacked=True,
            group_title="concurrency" if analysis.load_kind == "concurrency" else "requests/s",
        )


def _bars(point: Point, model: str, group: str) -> Iterator[Bar]:
    figures = point.models[model]
    stages = {stage: figures.stages.get(stage, 0.0) for stage in STAGES}
    yield Bar(group, "client send", 1e3 * figures.client_send)
    yield Bar(group, "network", 1e3 * max(0.0, figures.client_wait - sum(stages.values())))
    for stage, seconds in stages.items():
        yield Bar(group, _STAGE_NAMES[stage], 1e3 * seconds)


def _with_default(analysis: Analysis, placed: Sequence[Placed]) -> list[Placed]:
    default = analysis.default
    candidates = list(placed)
    if default is not None and default.point is not None and default not in candidates:
        candidates.append(default)
    return candidates
