"""The report of an analysis: result, ranking, charts, and a section per configuration; its summary. Pure.

The result is given in sentences: the best configuration, its advantage, the reasons and the doubts. Headings of tables
are those of model analyzer's reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from conch.measure.analyze.judging.ranking import DefaultComparison
from conch.measure.analyze.report.analysis import (
    Analysis,
    ConfigTraits,
    RankedCandidate,
    load_text,
    memory_of,
    other_changes,
    slowest,
    traits_of,
    utilisation_of,
)
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.perf.server.statistics import SERVER_STAGES
from conch.measure.reports.charts import Axis, Bar, Dot, Limit, Series, bar_chart, line_chart
from conch.measure.reports.numbers import (
    NONE,
    bytes_of,
    count,
    duration,
    megabytes,
    milliseconds,
    percent,
    significant,
    times,
)
from conch.measure.reports.report import (
    Block,
    Bullets,
    Chart,
    CodeBlock,
    Column,
    Note,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Table,
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
    answer, details = lead(analysis), headline(analysis)
    why = [*([details] if details != answer else []), *reasons(analysis)]
    if why:
        opening.append(Bullets(why))
    return Report(title(analysis), answer, sections, opening)


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


def _ranking(analysis: Analysis, detailed: Sequence[RankedCandidate]) -> Iterator[Section]:
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
        ratio = significant(_throughput_ratio(analysis, point, other), 2)
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
    yield Section("Latency, throughput and memory", [*_curves(analysis), *_memory_chart(analysis)], "charts")


def _curves(analysis: Analysis) -> Iterator[Chart]:
    chosen = _with_default(analysis, analysis.measured[:_CURVES])
    series = [
        Series(
            candidate.name,
            [
                Dot(
                    point.throughput,
                    1e3 * figures.percentiles.get(99, 0.0),
                    f"{point.load:g}{disturbed_mark(point)}",
                    muted=point.disturbed,
                )
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
        + (" Grey marks with an asterisk: other processes used the machine." if disturbed else ""),
        labels=labelled,
        limits=limits,
    )


def _memory_chart(analysis: Analysis) -> Iterator[Chart]:
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
        groups.setdefault(kind, []).append(
            Dot(memory / 1e6, measurement.point.throughput, measurement.name, muted=measurement.disturbed)
        )
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
        caption="Each mark is a configuration at its best load; better is to the left and above."
        + (" Other processes disturbed the grey ones." if any(dot.muted for dot in dots) else ""),
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


def _details(analysis: Analysis, candidate: RankedCandidate) -> Section:
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


def _stages(analysis: Analysis, candidate: RankedCandidate) -> Iterator[Chart]:
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
    stages = {stage: figures.stages.get(stage, 0.0) for stage in SERVER_STAGES}
    yield Bar(group, "client send", 1e3 * figures.client_send)
    yield Bar(group, "network", 1e3 * max(0.0, figures.client_wait - sum(stages.values())))
    for stage, seconds in stages.items():
        yield Bar(group, _STAGE_NAMES[stage], 1e3 * seconds)


def _with_default(analysis: Analysis, candidates: Sequence[RankedCandidate]) -> list[RankedCandidate]:
    default = analysis.default
    if default is None or default.point is None or default in candidates:
        return list(candidates)
    return [*candidates, default]


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

_Cell = Callable[[RankedCandidate], str]


def ranking_table(analysis: Analysis, candidates: Sequence[RankedCandidate], *, targets: bool = False) -> Table:
    """Return the candidates with the figures of their best points; with ``targets``, names link to their sections."""
    columns = _columns(analysis)
    rows = [
        Row(
            [cell(candidate) for _, cell in columns],
            _tone(good=candidate is analysis.recommended, muted=candidate.disturbed or not candidate.satisfied),
            candidate.name if targets else "",
        )
        for candidate in candidates
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
        *(
            (heading, cell)
            for heading, cell in optional
            if len({cell(candidate) for candidate in analysis.candidates}) > 1
        ),
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


def load_table(analysis: Analysis, candidate: RankedCandidate) -> Table:
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
                        *(milliseconds(figures.stages.get(stage)) for stage in SERVER_STAGES[:3]),
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


#: Changes below this fraction are not mentioned.
_WORTH: Final = 0.05


def title(analysis: Analysis) -> str:
    """Return the result as a title."""
    models = _names(analysis)
    if not analysis.measured:
        return f"No configuration of {models} could be measured"
    return {
        "use": f"A better configuration of {models}",
        "keep": f"Keep the configuration of {models}",
        "unproven": f"No configuration of {models} is proven to be better",
        "none": f"No configuration of {models} satisfies the constraints",
    }[analysis.advice]


def lead(analysis: Analysis) -> str:
    """Return the result in words that need no knowledge of the field."""
    best, names = analysis.best, _names(analysis)
    if best is None or best.point is None or analysis.disturbed or analysis.advice == "none":
        return headline(analysis)
    if analysis.advice == "unproven":
        return f"Do not change the configuration of {names} yet: no other one is proven to be better."
    if analysis.advice == "keep" or best.is_default:
        return f"Keep the configuration of {names}: of {len(analysis.measured)} that were measured, none is better."
    final = analysis.comparison
    after = final.winner if final is not None else best.point
    before = final.default if final is not None else analysis.default.point if analysis.default is not None else None
    now, then = slowest(after), slowest(before) if before is not None else None
    within = f"99 of 100 answers take at most {duration(now.percentiles.get(99))}" if now is not None else ""
    if before is None or not before.throughput or before.disturbed:
        return (
            f"Use {best.name}: {names} then answers {significant(after.throughput)} requests per second"
            f"{f', and {within}' if within else ''}."
        )
    if within and then is not None and before.load == after.load:
        within += f" instead of {duration(then.percentiles.get(99))}"
    return (
        f"Use {best.name}: {names} then answers {significant(after.throughput)} requests per second instead of"
        f" {significant(before.throughput)}{f', and {within}' if within else ''}."
    )


def headline(analysis: Analysis) -> str:
    """Return the result in one or two sentences."""
    best, default = analysis.best, analysis.default
    if not analysis.measured:
        return (
            f"No configuration of {_names(analysis)} could be measured: none of {len(analysis.candidates)}"
            " completed a request."
        )
    if best is None:
        first = analysis.measured[0]
        if first.disturbed:
            return (
                f"No configuration of {_names(analysis)} reached the goal ({analysis.goal}) while other processes"
                " used the machine."
            )
        violations = f": {'; '.join(first.broken)}" if first.broken else ""
        return (
            f"No configuration of {_names(analysis)} reaches the goal ({analysis.goal})."
            f" The closest is {first.name}{violations}."
        )
    assert best.point is not None
    figures = "" if analysis.disturbed else f": {_figures(analysis, best.point)}"
    if best.is_default:
        doubt = f", but {analysis.reason}" if analysis.advice == "unproven" else ""
        is_best = "looks" if doubt else "is the"
        return f"The configuration of the repository {is_best} best of {len(analysis.measured)}{figures}{doubt}."
    if analysis.advice == "keep":
        own = analysis.comparison.default if analysis.comparison is not None else default.point if default else None
        has = f" ({_figures(analysis, own)})" if own is not None and not own.disturbed else ""
        return f"Keep the configuration of the repository{has}: {analysis.reason}."
    if analysis.advice == "unproven":
        return f"{best.name} looks best of {len(analysis.measured)} configurations{figures}, but {analysis.reason}."
    final = analysis.comparison
    point = final.winner if final is not None else best.point
    return (
        f"{best.name} is the best of {len(analysis.measured)} configurations: {_figures(analysis, point)}"
        f"{_beside(analysis, point)}."
    )


def _beside(analysis: Analysis, best: Point) -> str:
    """Return the default's figures, and the ratio to them."""
    point = analysis.comparison.default if analysis.comparison is not None else None
    if point is None and analysis.default is not None:
        point = analysis.default.point
    if point is None or not point.throughput:
        return "; the default could not be measured"
    ratio = _throughput_ratio(analysis, best, point)
    own = _figures(analysis, point)
    if analysis.comparison is not None and analysis.comparison.unrivalled:
        return f"; the default does not satisfy the constraints ({own})"
    if 1 - _WORTH < ratio < 1 + _WORTH:
        return f"; the default reaches {own}"
    return f", {times(ratio)}{' the throughput of' if ratio >= 2 else ' throughput than'} the default ({own})"


def _throughput_ratio(analysis: Analysis, best: Point, default: Point) -> float:
    """Return how many times the default's throughput the best has: that of the final rounds, if they compare it."""
    if analysis.comparison is not None and analysis.only_throughput:
        return analysis.comparison.ratio
    return best.throughput / default.throughput


def reasons(analysis: Analysis) -> Iterator[str]:
    """Yield the changes of the best configuration, and their effects."""
    best, default = analysis.best, analysis.default
    if best is None or best.point is None or best.is_default:
        return
    if analysis.comparison is not None and not analysis.disturbed:
        yield f"In the final rounds {best.name} {_as_good(analysis, analysis.comparison)}."
    if analysis.advice == "keep":
        return
    for model in analysis.models:
        of = f"{model}: " if len(analysis.models) > 1 else ""
        after = traits_of(best.result, model, gpus=analysis.has_gpus)
        before = traits_of(default.result, model, gpus=analysis.has_gpus) if default is not None else None
        changes = list(_changes(before, after))
        if other := other_changes(best.result, model):
            changes.append(f"{other} is set")
        if changes:
            yield f"{of}{_capital(_listed(changes))}."
        if default is not None:
            yield from _effects(analysis, best, default, model, of)
    if default is not None and default.point is not None:
        yield from _memory(analysis, best.point, default.point)


def doubts(analysis: Analysis) -> Iterator[str]:
    """Yield the doubts: disturbed measurements, and configurations that are as good."""
    best = analysis.best
    yield from analysis.notes
    if best is not None and best.point is not None:
        if analysis.disturbed:
            yield f"Other processes used the machine while {best.name} was measured. Measure it again."
        for warning in best.point.warnings:
            yield f"{best.name} at {load_text(analysis, best.point.load)}: {warning}."
        tied = [candidate.name for candidate in analysis.candidates if candidate.tied and candidate is not best]
        if tied:
            are = "is" if len(tied) == 1 else "are"
            yield f"Within the noise {_listed(tied)} {are} as good as {best.name}, which is the simplest."
    points = [point for candidate in analysis.candidates for point in candidate.result.points]
    disturbed = sum(point.disturbed for point in points)
    if disturbed:
        were = "measurement was" if len(points) == 1 else "measurements was" if disturbed == 1 else "measurements were"
        yield f"{disturbed} of {len(points)} {were} disturbed by other processes on the machine."


def missing(analysis: Analysis) -> Iterator[str]:
    """Yield the measurements that are missing or failed, with the reasons."""
    for candidate in analysis.candidates:
        if candidate.result.error:
            yield f"{candidate.name}: {candidate.result.error.rstrip('.')}."
        elif candidate.point is None:
            yield f"{candidate.name}: no request succeeded."
        failed = sum(figures.failed for point in candidate.result.points for figures in point.models.values())
        if failed and candidate.point is not None:
            total = failed + sum(f.requests for point in candidate.result.points for f in point.models.values())
            yield f"{candidate.name}: {count(failed)} of {count(total)} requests failed."
    stopped = [
        candidate.name for candidate in analysis.candidates if candidate.point is not None and candidate.point.stopped
    ]
    if stopped:
        yield f"Measured briefly, because they were clearly worse: {_listed(stopped)}."


def _as_good(analysis: Analysis, comparison: DefaultComparison) -> str:
    """Return ``has 2.9 times the throughput of the default (2.7 to 3.1 with 95 % confidence)``."""
    ratio = significant(comparison.ratio)
    what = "has {} times the throughput of" if analysis.only_throughput else "is {} times as good as"
    within = comparison.interval
    sure = f"{significant(within.low)} to {significant(within.high)} with 95 % confidence" if within else "one round"
    return f"{what.format(ratio)} the default ({sure})"


def _figures(analysis: Analysis, point: Point) -> str:
    figures = slowest(point)
    latency = f" with a p99 latency of {duration(figures.percentiles.get(99))}" if figures is not None else ""
    return f"{significant(point.throughput)} infer/s{latency} at {load_text(analysis, point.load)}"


def _changes(before: ConfigTraits | None, after: ConfigTraits) -> Iterator[str]:
    if before is None or after.total != before.total:
        instead = f" instead of {before.total}" if before is not None else ""
        work = "instances work" if after.total != 1 else "instance works"
        yield f"{after.total} {work} at the same time{instead}"
    if after.batching and (before is None or not before.batching):
        yield f"requests that wait are computed together, up to {after.max_batch_size} at a time (dynamic batching)"
    elif before is not None and before.batching and not after.batching:
        yield "requests are computed one at a time (no dynamic batching)"
    elif before is not None and after.max_batch_size != before.max_batch_size:
        yield f"batches have up to {after.max_batch_size} requests instead of {before.max_batch_size}"
    if before is not None and after.delay != before.delay:
        held = (
            f"holds requests for up to {duration(after.delay / 1e6)} to fill a batch"
            if after.delay
            else "does not wait"
        )
        yield f"the queue {held}"
    if before is not None and after.preferred != before.preferred and after.preferred:
        yield f"batches of {_listed(list(map(str, after.preferred)))} are preferred"


def _effects(analysis: Analysis, best: RankedCandidate, default: RankedCandidate, model: str, of: str) -> Iterator[str]:
    """Yield the differences in stage times of the best configuration and the default at the same load."""
    assert best.point is not None
    other = next((point for point in default.result.points if point.load == best.point.load), None)
    if other is None or model not in other.models or model not in best.point.models:
        return
    if other.disturbed or best.point.disturbed:
        return
    now, then = best.point.models[model], other.models[model]
    parts = [
        text
        for stage, name in (("queue", "waits in the queue"), ("compute_infer", "is computed"))
        if (text := _compared(now, then, stage, name))
    ]
    if parts:
        yield f"{of}At {load_text(analysis, best.point.load)} a request {_listed(parts)}."


def _compared(now: ModelFigures, then: ModelFigures, stage: str, name: str) -> str:
    duration_now, duration_then = now.stages.get(stage), then.stages.get(stage)
    if (
        duration_now is None
        or duration_then is None
        or abs(duration_now - duration_then) <= _WORTH * max(duration_then, duration_now)
    ):
        return ""
    return f"{name} for {duration(duration_now)} instead of {duration(duration_then)}"


def _memory(analysis: Analysis, best: Point, default: Point) -> Iterator[str]:
    memory, default_memory = memory_of(best), memory_of(default)
    if memory is None or not default_memory or abs(memory / default_memory - 1) <= _WORTH:
        return
    where = "of GPU memory" if analysis.has_gpus else "of memory"
    ratio = memory / default_memory
    yield (
        f"It takes {bytes_of(memory)} {where}, {times(ratio)}{'' if ratio >= 2 else ' than'} the default's "
        f"{bytes_of(default_memory)}."
    )


def _names(analysis: Analysis) -> str:
    return _listed(list(analysis.models))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
