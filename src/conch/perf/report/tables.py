"""The tables of a measurement: their columns and cells, for pages.  Pure; times are milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from conch.perf.figures.latency import LatencyFigures
from conch.perf.measured import Measured
from conch.perf.plan import PerfPlan
from conch.perf.report.stages import server_of
from conch.reports.numbers import NONE, count, megabytes, milliseconds, percent, significant
from conch.reports.page import Column, Row, Table


def short_level(plan: PerfPlan, measured: Measured) -> str:
    """``concurrency 16``, ``100 requests/s``."""
    return f"{measured.level:g} requests/s" if plan.rates is not None else f"concurrency {measured.level:g}"


def level_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """What each level gave."""
    headings = [
        "Requests/s" if plan.rates is not None else "Concurrency", "Throughput (infer/s)", "95 % range", "Average (ms)",
        *(f"p{number:g} (ms)" for number in plan.percentiles), "Longest (ms)", "Queue (ms)", "Compute infer (ms)",
        "Batch size", "Requests", "Failed",
    ]  # fmt: skip
    rows = []
    for one in measured:
        latency, server = one.figures.latency, server_of(plan, one)
        sure = one.confidence.throughput if one.confidence is not None else None
        stages = server.stages if server is not None else {}
        rows.append(
            Row(
                [
                    f"{one.level:g}",
                    significant(one.figures.throughput),
                    f"{significant(sure.low)} – {significant(sure.high)}" if sure is not None else NONE,
                    *_times(latency, plan.percentiles),
                    *(milliseconds(stages[name].average) if name in stages else NONE
                      for name in ("queue", "compute_infer")),
                    significant(server.batch_size) if server is not None and server.executions else NONE,
                    count(one.figures.requests),
                    count(one.failed),
                ],
                "bad" if not one.figures.requests or one.gone else "muted" if one.disturbed else "",
            )
        )  # fmt: skip
    return Table("Figures by level", [Column(heading, number=True) for heading in headings], rows)


def generation_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """Tokens, and how long they took."""
    goodput = any(one.generation is not None and one.generation.goodput is not None for one in measured)
    headings = [
        "Requests/s" if plan.rates is not None else "Concurrency", "Tokens/s in all", "Tokens/s of a request",
        *(["Within the objective (requests/s)"] if goodput else []), "First token, p50 (ms)", "First token, p99 (ms)",
        "Inter-token, p50 (ms)", "Inter-token, p99 (ms)",
    ]  # fmt: skip
    rows = [
        Row([
            f"{one.level:g}", significant(found.tokens), significant(found.tokens_per_user),
            *([significant(found.goodput)] if goodput else []),
            *(milliseconds(times.percentiles[number]) if times is not None else NONE
              for times in (found.ttft, found.itl) for number in (50, 99)),
        ])
        for one in measured if (found := one.generation) is not None
    ]  # fmt: skip
    return Table("Tokens by level", [Column(heading, number=True) for heading in headings], rows)


def resources_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """What the server and its processes used, and its own metrics."""
    uuids = sorted({uuid for one in measured if one.resources is not None for uuid in one.resources.gpus})
    metrics = list(dict.fromkeys(name for one in measured for name in one.metrics))
    headings = [
        "Requests/s" if plan.rates is not None else "Concurrency", "Cores", "Memory (MB)",
        *(f"{uuid}: {what}" for uuid in uuids for what in ("busy", "memory (MB)", "power (W)")),
        *(f"{name}: {what}" for name in metrics for what in ("average", "largest")),
    ]  # fmt: skip
    rows = []
    for one in measured:
        used = one.resources
        cells = [f"{one.level:g}"]
        cells += [significant(used.cores), megabytes(used.memory)] if used is not None else [NONE, NONE]
        for uuid in uuids:
            gpu = used.gpus.get(uuid) if used is not None else None
            known = [percent(gpu.utilisation), megabytes(gpu.memory), significant(gpu.power)] if gpu is not None else []
            cells += known or [NONE] * 3
        for name in metrics:
            metric = one.metrics.get(name)
            cells += [significant(metric.average), significant(metric.largest)] if metric is not None else [NONE] * 2
        rows.append(Row(cells))
    return Table("The server's processes by level", [Column(heading, number=True) for heading in headings], rows)


def machine_tables(plan: PerfPlan, measured: Sequence[Measured]) -> Iterator[Table]:
    """What others did with the machine of the senders meanwhile; none where nobody looked."""
    headings = [
        "Requests/s" if plan.rates is not None else "Concurrency", "Load before", "Load during", "Used by others",
        "Taken by the host (steal)",
    ]  # fmt: skip
    rows = []
    for one in measured:
        if (machine := one.machine) is not None:
            seen = machine.interference
            others = NONE if machine.unseen else percent(seen.others)
            cells = [f"{one.level:g}", f"{machine.load_before:.1f}", f"{machine.load_during:.1f}", others]
            cells += [
                percent(seen.stolen),
                ", ".join(f"{rival.name} ({rival.cores:.2f} cores)" for rival in machine.rivals),
            ]
            rows.append(Row(cells, "bad" if one.disturbed else ""))
    if rows:
        columns = [*(Column(heading, number=True) for heading in headings), Column("Busiest others")]
        yield Table("The machine of the senders by level", columns, rows)


def failures_table(plan: PerfPlan, measured: Sequence[Measured]) -> Table:
    """What went wrong, the most frequent first."""
    rows = [
        Row([short_level(plan, one), count(number), message], "bad")
        for one in measured
        for message, number in Counter(one.errors).most_common(10)
    ]
    return Table("Errors by level", [Column("Level"), Column("Times", number=True), Column("Message")], rows)


def _times(latency: LatencyFigures | None, percentiles: Sequence[float]) -> Iterator[str]:
    if latency is None:
        yield from [NONE] * (len(percentiles) + 2)
        return
    yield milliseconds(latency.average)
    yield from (milliseconds(latency.percentiles[number]) for number in percentiles)
    yield milliseconds(latency.longest)
