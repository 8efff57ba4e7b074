"""From the runs of a level to its figures.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conch.perf.figures.confidence import confidence_of
from conch.perf.figures.generation import generation_of
from conch.perf.figures.latency import figures_of
from conch.perf.level import LevelRun
from conch.perf.measured import LevelRecords, MachineFigures, Measured
from conch.perf.plan import PerfPlan
from conch.perf.senders.records import join_events
from conch.perf.server.resources import MetricFigures, ResourceFigures
from conch.perf.server.statistics import added, differences


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen beside the requests: the machine, what the server used of it, the metrics that it shows, and the
    senders' limit (requests a second)."""

    machine: MachineFigures | None = None
    resources: ResourceFigures | None = None
    metrics: dict[str, MetricFigures] = field(default_factory=dict)
    limit: float | None = None


def sum_up(
    plan: PerfPlan, level: float, runs: Sequence[LevelRun], inferences: NDArray[np.int64], observed: Observed,
    *, writes_text: bool,
) -> Measured:  # fmt: skip
    """The level over all its runs; percentiles are over all requests of the windows that count."""
    counted = [window for run in runs for window in run.counted]
    spans = tuple(window.span for window in counted)
    parts = [run.recording.within([window.span for window in run.counted]) for run in runs]
    records, events = np.concatenate([part for part, _ in parts]), join_events(parts)
    of_runs = tuple(run.figures() for run in runs) if len(runs) > 1 else ()
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.recording.errors)
    last = runs[-1]
    unfinished, now = last.recording.unfinished, last.windows[-1].span[1]
    wanted = plan.total_requests * len(runs)
    return Measured(
        level,
        figures_of(records, spans, inferences, plan.percentiles),
        generation_of(records, events, spans, plan.objective) if writes_text else None,
        tuple(window.figures for run in runs for window in run.windows),
        bool(plan.total_requests) or all(run.stability.stable for run in runs),
        tuple(added([differences(*window.statistics) for window in counted])),
        dict(errors),
        max(run.recording.busy for run in runs),
        unfinished.count,
        max(0, now - unfinished.first_due) / 1e9 if unfinished.count else 0.0,
        disturbed=any(run.stability.disturbed for run in runs),
        machine=observed.machine,
        resources=observed.resources,
        metrics=observed.metrics,
        runs=of_runs,
        confidence=confidence_of(of_runs, "runs") or confidence_of([one.figures for one in counted], "windows"),
        limit=observed.limit,
        gone=last.gone,
        stopped=last.stopped,
        missing=max(0, wanted - len(records)),
        rate=level if plan.rates is not None and not plan.intervals and not plan.total_requests else 0.0,
        records=LevelRecords(records, events, spans) if plan.keep_records else None,
    )
