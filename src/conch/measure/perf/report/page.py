"""The report of a measurement: warnings, figures of each level, and charts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeVar

from conch import __version__
from conch.measure.perf.figures import WINDOWS, LatencyFigures
from conch.measure.perf.measured import LevelDistributions, Measured, Quantiles, server_of, stages_of
from conch.measure.perf.plan import PerfPlan
from conch.measure.reports.charts import Axis, Bar, Dot, Series, bar_chart, line_chart, percentile_chart
from conch.measure.reports.numbers import bytes_of, count, duration, megabytes, milliseconds, percent, significant
from conch.measure.reports.report import (
    Block,
    Cell,
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
)


def short_level(plan: PerfPlan, measured: Measured) -> str:
    """Return a short name of the level: ``concurrency 16``, ``100 requests/s``."""
    return f"{measured.level:g} requests/s" if plan.rates is not None else f"concurrency {measured.level:g}"


def level_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """Return a table of the figures of each level."""
    main = (50, 99, plan.percentile)
    columns = [
        _level_column(plan),
        Column("Throughput (infer/s)", True, significant, "infer/s"),
        Column("95 % range", True, narrow="hide"),
        Column("Average (ms)", True, milliseconds),
        *(Column(f"p{number:g} (ms)", True, milliseconds, narrow="keep" if number in main else "hide")
          for number in plan.percentiles),
        Column("Longest (ms)", True, milliseconds, narrow="hide"),
        Column("Queue (ms)", True, milliseconds),
        Column("Compute infer (ms)", True, milliseconds),
        Column("Batch size", True, significant, narrow="hide"),
        Column("Requests", True, count, narrow="hide"),
        Column("Failed", True, count),
    ]  # fmt: skip
    rows = []
    for measurement in measured:
        figures, server = measurement.figures, server_of(plan, measurement)
        interval = measurement.confidence.throughput if measurement.confidence is not None else None
        stages = server.stages if server is not None else {}
        rows.append(
            Row(
                [
                    f"{measurement.level:g}",
                    figures.throughput,
                    f"{significant(interval.low)} – {significant(interval.high)}" if interval is not None else None,
                    *_times(figures.latency, plan.percentiles),
                    *(stages[name].average if name in stages else None for name in ("queue", "compute_infer")),
                    server.batch_size if server is not None and server.executions else None,
                    figures.requests,
                    measurement.failed,
                ],
                "bad" if not figures.requests or measurement.gone else "muted" if measurement.disturbed else "",
            )
        )
    return Table("Figures by level", columns, rows)


def generation_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """Return a table of token rates and times."""
    known = [(measurement, measurement.generation) for measurement in measured if measurement.generation is not None]
    goodput = any(generation.goodput is not None for _, generation in known)
    columns = [
        _level_column(plan),
        Column("Tokens/s in all", True, significant),
        Column("Tokens/s of a request", True, significant),
        *([Column("Within the objective (requests/s)", True, significant)] if goodput else []),
        *(Column(f"{what}, p{number} (ms)", True, milliseconds) for what in ("First token", "Inter-token")
          for number in (50, 99)),
    ]  # fmt: skip
    rows = [
        Row([
            f"{measurement.level:g}", generation.tokens, generation.tokens_per_user,
            *([generation.goodput] if goodput else []),
            *(times.percentiles[number] if times is not None else None
              for times in (generation.ttft, generation.itl) for number in (50, 99)),
        ], "muted" if measurement.disturbed else "")
        for measurement, generation in known
    ]  # fmt: skip
    return Table("Tokens by level", columns, rows)


def resources_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """Return a table of the resources of the server and its processes, and of its metrics."""
    uuids = sorted(
        {uuid for measurement in measured if measurement.resources is not None for uuid in measurement.resources.gpus}
    )
    metrics = list(dict.fromkeys(name for measurement in measured for name in measurement.metrics))
    columns = [_level_column(plan), Column("Cores", True, significant), Column("Memory (MB)", True, megabytes)]
    for uuid in uuids:
        columns += [
            Column(f"{uuid}: busy", True, percent), Column(f"{uuid}: memory (MB)", True, megabytes),
            Column(f"{uuid}: power (W)", True, significant),
        ]  # fmt: skip
    columns += [Column(f"{name}: {what}", True, significant) for name in metrics for what in ("average", "largest")]
    rows = []
    for measurement in measured:
        used = measurement.resources
        cells: list[Cell] = [f"{measurement.level:g}"]
        cells += [used.cores, used.memory] if used is not None else [None] * 2
        for uuid in uuids:
            gpu = used.gpus.get(uuid) if used is not None else None
            cells += [gpu.utilisation, gpu.memory, gpu.power] if gpu is not None else [None] * 3
        for name in metrics:
            metric = measurement.metrics.get(name)
            cells += [metric.average, metric.largest] if metric is not None else [None] * 2
        rows.append(Row(cells, "muted" if measurement.disturbed else ""))
    return Table("The server's processes by level", columns, rows)


def machine_tables(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[Table]:
    """Yield a table of interference on the senders' machine; none if it was not measured."""
    columns = [
        _level_column(plan),
        Column("Load before", True, "{:.1f}".format),
        Column("Load during", True, "{:.1f}".format),
        Column("Used by others", True, percent),
        Column("Taken by the host (steal)", True, percent),
        Column("Busiest others"),
    ]
    rows = []
    for measurement in measured:
        if (machine := measurement.machine) is not None:
            cells: list[Cell] = [
                f"{measurement.level:g}", machine.load_before, machine.load_during,
                None if machine.unseen else machine.interference.others, machine.interference.stolen,
                ", ".join(f"{rival.name} ({rival.cores:.2f} cores)" for rival in machine.rivals),
            ]  # fmt: skip
            rows.append(Row(cells, "bad" if measurement.disturbed else ""))
    if rows:
        yield Table("The machine of the senders by level", columns, rows)


def failures_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """Return a table of errors, the most frequent first."""
    rows = [
        Row([short_level(plan, measurement), number, message], "bad")
        for measurement in measured
        for message, number in Counter(measurement.errors).most_common(10)
    ]
    return Table("Errors by level", [Column("Level"), Column("Times", True, count), Column("Message")], rows)


def _level_column(plan: PerfPlan) -> Column:
    return Column("Requests/s" if plan.rates is not None else "Concurrency", True, short="" if plan.rates else "conc.")


def _times(latency: LatencyFigures | None, percentiles: Sequence[float]) -> list[float | None]:
    if latency is None:
        return [None] * (len(percentiles) + 2)
    return [latency.average, *(latency.percentiles[number] for number in percentiles), latency.longest]


_Of = TypeVar("_Of")
#: Maximum number of lines in a chart; with more levels, some of them are left out.
_LINES: Final = 6


def report(
    plan: PerfPlan, opening: str, command: str, measured: Sequence[Measured],
    distributions: Sequence[LevelDistributions],
) -> Report:  # fmt: skip
    """Return the report; ``opening`` describes the server, model and requests, ``distributions`` are by level.

    Levels that other processes disturbed are grey, and count only if all were disturbed.
    """
    completed = [measurement for measurement in measured if measurement.figures.latency is not None]
    latencies = [level.latency for level in distributions]
    latency = _distribution(plan, measured, latencies, "Distribution of latency", "latency (ms)", wide=True)
    has_resources = any(measurement.resources is not None or measurement.metrics for measurement in measured)
    sections = [
        Section("Figures", [level_table(plan, measured), *_throughput(plan, completed)], "figures"),
        Section("Latency", list(latency), "latency"),
        Section("Time by stage", list(_stages(plan, completed)), "stages"),
        Section("Tokens", list(_generation(plan, measured, distributions)), "tokens"),
        Section("Over time", list(_over_time(plan, measured)), "time"),
        Section("Server resources", [resources_table(plan, measured)] if has_resources else [], "used"),
        Section("Errors", list(_failed(plan, measured)), "failed"),
        Section(
            "Machine and settings",
            [Properties(list(_facts(plan, measured))), *machine_tables(plan, measured)],
            "machine",
        ),
        Section("How to reproduce", [CodeBlock(command)], "command"),
    ]
    return Report(
        f"{plan.model}, measured",
        _result(plan, measured, completed),
        [section for section in sections if section.blocks],
        [*_warnings(plan, measured), *_tiles(plan, completed), Paragraph(f"{opening.splitlines()[0]}.")],
        f"Written by conch {__version__}. Latency is from when a request should have started to its last byte.",
    )


def _warnings(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[Note]:
    """Yield the warnings; a disturbance of several levels is mentioned once."""
    disturbed = [measurement for measurement in measured if measurement.disturbed and measurement.machine is not None]
    if len(disturbed) > 1:
        worst = max(
            disturbed, key=lambda measurement: measurement.machine.interference.others if measurement.machine else 0.0
        )
        yield Note(
            "warning",
            f"other processes used the machine while {len(disturbed)} of {len(measured)} levels were measured, so their"
            f" figures are not reliable; most at {short_level(plan, worst)}: {worst.machine}.",
        )
    for measurement in measured:
        for warning in measurement.warnings:
            if len(disturbed) < 2 or not warning.startswith("disturbed:"):
                kind: Literal["warning", "error"] = (
                    "warning" if measurement.figures.requests and not measurement.gone else "error"
                )
                yield Note(kind, f"{short_level(plan, measurement)}: {warning}.")


def _best(completed: Sequence[Measured]) -> Measured:
    """Return the level of the highest throughput, of those that were not disturbed if there are any."""
    quiet = [measurement for measurement in completed if not measurement.disturbed]
    return max(quiet or completed, key=lambda measurement: measurement.figures.throughput)


def _result(plan: PerfPlan, measured: Sequence[Measured], completed: Sequence[Measured]) -> str:
    """Return the result in words that need no knowledge of the field."""
    if not completed:
        return f"{plan.model} answered no request."
    best = _best(completed)
    latency = best.figures.latency
    assert latency is not None
    if best.disturbed:
        return (
            f"The speed of {plan.model} is not known: other processes used the machine during the whole measurement."
            " Repeat it on an idle machine."
        )
    what = "requests" if plan.batch_size == 1 else "inferences"
    if plan.rates is not None:
        load = f"of {best.level:g} requested per second"
    else:
        load = f"for {best.level:g} clients at once" if best.level != 1 else "for one client"
    median, slowest = duration(latency.percentiles[50]), duration(latency.percentiles[99])
    answered = best.figures.requests + best.failed
    failed = f" {percent(best.failed / answered)} of the requests failed." if best.failed else ""
    grey = " Grey levels were disturbed by other processes and do not count." if _disturbed(measured) else ""
    return (
        f"{plan.model} answers up to {significant(best.figures.throughput)} {what} per second {load}: half of the"
        f" answers take at most {median}, and 99 of 100 at most {slowest}.{failed}{grey}"
    )


def _disturbed(measured: Sequence[Measured]) -> bool:
    return any(measurement.disturbed for measurement in measured)


def _tiles(plan: PerfPlan, completed: Sequence[Measured]) -> Iterator[Block]:
    if not completed:
        return
    best = _best(completed)
    first, latency = completed[0].figures.latency, best.figures.latency
    assert first is not None and latency is not None
    where = short_level(plan, best)
    sure = best.confidence.throughput if best.confidence is not None else None
    within = f"{where}; {significant(sure.low)} to {significant(sure.high)} with 95 %" if sure is not None else where
    tiles = [_tile(best, f"{significant(best.figures.throughput)} infer/s", "highest throughput", within)]
    if best.generation is not None:
        tiles.append(_tile(best, f"{significant(best.generation.tokens)} tokens/s", "in all", where))
    tiles.append(_tile(best, duration(latency.percentiles[99]), "p99 latency", where))
    if best is not completed[0]:
        lowest = short_level(plan, completed[0])
        tiles.append(_tile(completed[0], duration(first.percentiles[50]), "median latency", lowest))
    if best.resources is not None:
        tiles.append(Tile(significant(best.resources.cores), "cores used by the server", where))
        tiles.append(Tile(bytes_of(best.resources.gpu_memory or best.resources.memory),
                          "GPU memory" if best.resources.gpus else "memory of the server", "at most"))  # fmt: skip
    yield Tiles(tiles)


def _tile(measured: Measured, value: str, label: str, detail: str) -> Tile:
    """Return a tile with a figure of a level, muted if the level was disturbed."""
    if measured.disturbed:
        return Tile(value, label, f"disturbed; {detail}", "muted")
    return Tile(value, label, detail)


def _throughput(plan: PerfPlan, completed: Sequence[Measured]) -> Iterator[Chart]:
    if len(completed) < 2:
        return
    numbers = [number for number in plan.percentiles if number in (50, 90, 99, plan.percentile)]
    series = []
    for number in numbers:
        dots = []
        for measurement in completed:
            assert measurement.figures.latency is not None
            known = measurement.confidence.percentiles.get(number) if measurement.confidence is not None else None
            low, high = (1e3 * known.low, 1e3 * known.high) if known is not None else (None, None)
            latency = 1e3 * measurement.figures.latency.percentiles[number]
            dots.append(
                Dot(
                    measurement.figures.throughput, latency, f"{measurement.level:g}", low, high, measurement.disturbed
                )
            )  # fmt: skip
        series.append(Series(f"p{number:g}", dots))
    best = _best(completed)
    yield line_chart(
        "Latency against throughput",
        series,
        Axis("throughput (infer/s)"),
        Axis("latency (ms)", logarithmic=True),
        alt=f"Throughput is highest at {short_level(plan, best)}: {significant(best.figures.throughput)} infer/s.",
        caption="Better is to the right and below. Labels are the "
        + ("request rate" if plan.rates is not None else "concurrency")
        + "; bars are 95 % ranges."
        + (" Other processes disturbed the grey marks." if _disturbed(completed) else ""),
        labels=len(completed) <= 12,
    )


def _generation(
    plan: PerfPlan, measured: Sequence[Measured], distributions: Sequence[LevelDistributions]
) -> Iterator[Block]:
    if any(measurement.generation is not None for measurement in measured):
        yield generation_table(plan, measured)
    first = [level.ttft for level in distributions]
    yield from _distribution(plan, measured, first, "Time to the first token", "time to first token (ms)", wide=False)
    between = [level.itl for level in distributions]
    yield from _distribution(plan, measured, between, "Time between tokens", "inter-token latency (ms)", wide=False)


def _distribution(
    plan: PerfPlan, measured: Sequence[Measured], quantiles: Sequence[Quantiles], title: str, unit: str, *, wide: bool
) -> Iterator[Chart]:
    pairs = [
        (measurement, distribution)
        for measurement, distribution in zip(measured, quantiles, strict=True)
        if distribution
    ]
    shown = _some(pairs)
    if not shown:
        return
    last, distribution = shown[-1]
    yield percentile_chart(
        title,
        [
            Series(_named(plan, measurement), [Dot(share, 1e3 * value) for share, value in of])
            for measurement, of in shown
        ],
        Axis(unit, logarithmic=True),
        alt=f"At {short_level(plan, last)} it is {duration(_at(distribution, 0.5))} at the median and"
        f" {duration(_at(distribution, 0.99))} at the 99th percentile.",
        caption="The time within which each fraction of the requests completed, on a scale that is logarithmic towards"
        " the slowest."
        if wide
        else "",
        wide=wide,
    )


def _named(plan: PerfPlan, measured: Measured) -> str:
    return short_level(plan, measured) + (", disturbed" if measured.disturbed else "")


def _stages(plan: PerfPlan, completed: Sequence[Measured]) -> Iterator[Chart]:
    bars = [
        Bar(
            f"{measurement.level:g}{', disturbed' if measurement.disturbed else ''}",
            name.replace("_", " "),
            1e3 * seconds,
        )
        for measurement in completed
        for name, seconds in stages_of(plan, measurement).items()
    ]
    if not bars:
        return
    stages = stages_of(plan, completed[-1])
    largest = max(stages, key=lambda name: stages[name])
    yield bar_chart(
        "Average time of a request by stage",
        bars,
        Axis("time (ms)"),
        alt=f"At {short_level(plan, completed[-1])} the longest stage is {largest.replace('_', ' ')},"
        f" {duration(stages[largest])}.",
        caption="The client measures send and receive, and the server the stages from queue to compute output; network"
        " is the rest of the client's wait. Streams are received while the server computes.",
        stacked=True,
        group_title="requests/s" if plan.rates is not None else "concurrency",
    )


def _over_time(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[Chart]:
    shown = _some([measurement for measurement in measured if len(measurement.windows) > 1])
    disturbed = ", ".join(short_level(plan, measurement) for measurement in shown if measurement.disturbed)
    counted = f"Figures are from the last {WINDOWS} undisturbed windows that agree."
    if disturbed:
        counted = f"Figures are from the last {WINDOWS} windows that agree. Disturbed windows count at {disturbed}."
    if any(dot.muted for measurement in shown for dot in _windows(measurement, lambda window: window.throughput)):
        counted += " Disturbed windows are grey."
    for title, unit, value in (
        ("Throughput by window", "throughput (infer/s)", lambda window: window.throughput),
        ("p99 latency by window", "p99 latency (ms)",
         lambda window: 1e3 * window.latency.percentiles[99] if window.latency else float("nan")),
    ):  # fmt: skip
        series = [Series(_named(plan, measurement), list(_windows(measurement, value))) for measurement in shown]
        if series:
            longest = max(len(line.dots) for line in series)
            yield line_chart(
                title, series, Axis("seconds of the level"), Axis(unit), wide=False,
                alt=f"{len(series)} levels in up to {longest} windows.",
                caption=counted,
            )  # fmt: skip


def _windows(measured: Measured, value: Callable[..., float]) -> Iterator[Dot]:
    ends = accumulate(window.seconds for window in measured.windows)
    for end, window in zip(ends, measured.windows, strict=True):
        disturbed = window.interference is not None and window.interference.disturbs
        label = f"disturbed: {window.interference}" if disturbed else f"{window.requests} requests"
        yield Dot(end, value(window), label, muted=disturbed)


def _failed(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[Block]:
    failed = sum(measurement.failed for measurement in measured)
    if any(measurement.errors for measurement in measured):
        yield Paragraph(f"{count(failed)} requests failed in the windows that count. Latencies exclude them.")
        yield failures_table(plan, measured)


def _facts(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[tuple[str, str]]:
    machines = [measurement.machine for measurement in measured if measurement.machine is not None]
    if machines:
        yield "machine of the senders", str(machines[0].facts)
        if machines[0].unseen:
            yield "the server's processes", machines[0].unseen
    limits = [measurement.limit for measurement in measured if measurement.limit]
    if limits:
        yield "limit of the senders", f"{count(min(limits))} requests per second"
    yield "protocol", plan.protocol + (f", {plan.endpoint}" if plan.endpoint != "infer" else "")
    yield "request data", measured[0].sent or "no inputs"
    yield "inferences per request", str(plan.batch_size)
    yield "measurement", _measuring(plan)


def _measuring(plan: PerfPlan) -> str:
    """Describe the lengths and the number of windows and runs."""
    warm_up = f"{count(plan.warm_up_requests)} requests" if plan.warm_up_requests else duration(plan.warm_up)
    runs = f", {plan.runs} runs of each level" if plan.runs > 1 else ""
    if plan.total_requests:
        return f"{count(plan.total_requests)} requests; {warm_up} of warm-up{runs}"
    length = f"{count(plan.requests)} requests" if plan.requests else duration(plan.interval)
    return (
        f"windows of {length} until {WINDOWS} agree within {plan.share:.0%}, at most {plan.trials};"
        f" {warm_up} of warm-up{runs}"
    )


def _at(quantiles: Quantiles, share: float) -> float:
    return next((value for reached, value in quantiles if reached >= share), quantiles[-1][1])


def _some(items: Sequence[_Of]) -> list[_Of]:
    """Return at most ``_LINES`` items: both ends, and others at even distances between them."""
    if len(items) <= _LINES:
        return list(items)
    step = (len(items) - 1) / (_LINES - 1)
    return [items[round(number * step)] for number in range(_LINES)]
