"""Runs a measurement: reads the model from the server and measures the load levels.

``conch perf`` and ``conch analyze`` call it. Requests are sent by separate processes that do nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.core.errors import ConchError, invalid
from conch.machine.facts import usable_cores
from conch.measure.perf.breakdown import METRICS_PORT, StageReader
from conch.measure.perf.figures import confidence_of, figures_of, generation_of
from conch.measure.perf.inputs.specs import ModelSpec, read_model
from conch.measure.perf.level import LevelEnvironment, LevelRun, MachineWatch, OnCollected, OnWindow
from conch.measure.perf.measured import LevelRecords, Measured
from conch.measure.perf.plan import Levels, PerfPlan
from conch.measure.perf.requests.shared_memory import MemoryLayout, SharedRegion
from conch.measure.perf.senders.generator import Generators
from conch.measure.perf.senders.limit import SenderLimit
from conch.measure.perf.senders.load import Constant, Intervals, Poisson, Schedule
from conch.measure.perf.senders.records import join_events
from conch.measure.perf.server.api import ServerApi
from conch.measure.perf.server.resources import (
    GpuReader,
    GpuSampler,
    MetricsSampler,
    ServerProcesses,
    find_server,
)
from conch.measure.perf.server.statistics import added, differences
from conch.measure.perf.traffic import traffic_of


class LevelSearch:
    """Iterates over the load levels; chooses each level from the latency at the previous one, as perf_analyzer does.

    The caller passes each measured latency to :meth:`note` before it takes the next level. A linear search ends at the
    first level whose latency exceeds ``limit`` (s, 0: no limit). A binary search ends when levels are closer than the
    step.
    """

    def __init__(self, levels: Levels, limit: float = 0.0, *, binary: bool = False) -> None:
        """Create the search; raises INVALID_ARG for a search that would not end."""
        if binary and not (limit and levels.last > levels.first):
            raise invalid(
                "--binary-search searches for the highest load below --latency-threshold between start and end: set "
                "both"
            )
        if not levels.last and not limit:
            raise invalid("a range with the end 0 requires --latency-threshold")
        self._levels, self._limit, self._binary = levels, limit, binary
        self._within: bool | None = None

    def __iter__(self) -> Iterator[float]:
        return self._halves() if self._binary else self._steps()

    def note(self, latency: float | None) -> None:
        """Record the latency (s) at the last level; None if no request was completed."""
        self._within = latency is not None and (not self._limit or latency <= self._limit)

    def _steps(self) -> Iterator[float]:
        for level in self._levels:
            yield level
            if self._limit and not self._within:
                return

    def _halves(self) -> Iterator[float]:
        low, high, step = self._levels.first, self._levels.last, self._levels.step
        for level in (low, high):
            yield level
            if bool(self._within) is (level == high):
                return
        while high - low > step:
            middle = low + max(1, round((high - low) / 2 / step)) * step
            if middle >= high:
                return
            yield middle
            if self._within:
                low = middle
            else:
                high = middle


def sum_up(
    plan: PerfPlan, level: float, runs: Sequence[LevelRun], inferences: NDArray[np.int64], *, writes_text: bool
) -> Measured:
    """Return the figures of a level over all its runs; percentiles are over all requests of the windows that count."""
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
    expected = plan.total_requests * len(runs)
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
        runs=of_runs,
        confidence=confidence_of(of_runs, "runs") or confidence_of([window.figures for window in counted], "windows"),
        gone=last.gone,
        stopped=last.stopped,
        missing=max(0, expected - len(records)),
        rate=level if plan.rates is not None and not plan.intervals and not plan.total_requests else 0.0,
        records=LevelRecords(records, events, spans) if plan.keep_records else None,
    )


#: Number of callers per sending process.
CALLERS_PER_PROCESS: Final = 128
#: Timeout for requests of a completed level before the next level begins (s).
_REST_SECONDS: Final = 5.0
#: Interval at which the progress of a warm-up is checked (s).
_CHECK_SECONDS: Final = 0.02
#: A warm-up without completed requests for this time (s) ends; the measurement then reports that the server hangs.
_WARM_UP_SILENCE: Final = 60.0


class Measurement:
    """A server, a model and its requests, ready to be measured; closing it ends the sending processes.

    Raises UNAVAILABLE if the server cannot be reached, NOT_FOUND if it does not have the model, and INVALID_ARG for
    data that the model does not accept.
    """

    def __init__(self, plan: PerfPlan, prefix: str = "") -> None:
        self.plan = plan
        self._search = LevelSearch(plan.rates or plan.concurrency, plan.latency_limit, binary=plan.binary_search)
        self.server: Mapping[str, Any] = {}
        with ExitStack() as closing:  # closes everything opened so far if a later step fails
            self._prepare(prefix, closing)
            self._closing = closing.pop_all()

    def _prepare(self, prefix: str, closing: ExitStack) -> None:
        plan = self.plan
        api = ServerApi(plan.address, grpc=plan.protocol == "grpc", prefix=prefix, headers=plan.headers)
        self._api = closing.enter_context(api)
        self.model = ModelSpec(plan.model, plan.version, {}, 0, decoupled=True)
        if plan.protocol == "openai":
            plan.address.check_listens()
            with suppress(ConchError):  # another server may implement only the OpenAI API
                self.server = self._api.server()
        else:
            self.server = self._api.server()
            metadata = self._api.metadata(plan.model, plan.version)
            self.model = read_model(metadata, self._api.config(plan.model, plan.version), plan.version)
            for name, version in plan.composing.items():
                self._api.metadata(name, version)
        memory = MemoryLayout.of(self.model, plan.batch_size, plan.output_size) if plan.shared_memory else None
        traffic = traffic_of(plan, self.model, prefix, memory)
        #: Description of the requests.
        self.sent = traffic.sent
        self._inferences = np.array([payload.inferences for payload in traffic.payloads])
        self._writes_text = traffic.generates
        self._leaves_traces = traffic.sequences is not None or plan.shared_memory
        self._counts = False
        self._starts = 0
        if memory is not None:
            closing.callback(SharedRegion(memory, self._api).close)
        self._generators = Generators(traffic, self._processes())
        closing.callback(self._end)
        self._limit = SenderLimit(traffic, self._processes()) if plan.sender_limit else None
        if self._limit is not None:
            closing.callback(self._limit.close)

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.close()

    def stage_reader(self, metrics_url: str = "") -> StageReader:
        """Return a reader of the stage times of the model's workers; the server's metrics endpoint is the default."""
        default = f"http://{replace(self.plan.address, port=METRICS_PORT).shown}/metrics"
        return StageReader(metrics_url or default, self._api, self.plan.model)

    def levels(self) -> Iterator[float]:
        """Iterate over the levels of the plan: concurrency or request rates (requests per second)."""
        return iter(self._search)

    def measure(
        self,
        level: float,
        on_window: OnWindow = lambda window: None,
        before_rest: Callable[[], object] = lambda: None,
        on_collected: OnCollected = lambda collected: None,
    ) -> Measured:
        """Measure one level in as many runs as the plan requires.

        ``on_window`` receives the figures of each window and ends the level by returning True. KeyboardInterrupt ends
        it too, and is raised only before the first window is complete. ``on_collected`` receives all requests as they
        are collected.
        """
        self._counts = bool(self.server)
        callers = int(level) if self.plan.rates is None else self.plan.max_calls
        limit = self._limit.at(callers) if self._limit is not None else None
        server = find_server(self.plan.address)
        watch = MachineWatch(server)
        gpus, metrics = self._samplers(server)
        around = LevelEnvironment(
            self._statistics, watch.since_last, self._gone, begin=partial(self._load, level), on_collected=on_collected
        )
        with gpus or nullcontext(), metrics or nullcontext():
            runs = self._runs(level, around, on_window, before_rest)
        counted = [window for run in runs for window in run.counted]
        spans = [window.span for window in counted]
        used = watch.resources([window.reading for window in counted])
        if used is not None and gpus is not None:
            used = replace(used, gpus=gpus.figures(spans, server.pids))
        measured = replace(
            sum_up(self.plan, level, runs, self._inferences, writes_text=self._writes_text),
            machine=watch.machine([window.reading for window in counted]), resources=used,
            metrics=metrics.figures(spans) if metrics else {}, limit=limit, sent=self.sent,
        )  # fmt: skip
        self._search.note(measured.figures.judged(self.plan.percentile))
        return measured

    def _runs(
        self, level: float, around: LevelEnvironment, on_window: OnWindow, before_rest: Callable[[], object]
    ) -> list[LevelRun]:
        """Run the level at least once; return fewer runs than planned if one ended early."""
        runs: list[LevelRun] = []
        try:
            for _ in range(self.plan.runs):
                run = LevelRun(self.plan, self._generators, around, self._inferences)
                self._warm_up(level)
                run.take(on_window)
                runs.append(run)
                before_rest()
                if run.stopped or run.gone:
                    break
                self._rest()
        except KeyboardInterrupt:  # also between runs, and while requests complete
            if not runs:
                raise
            runs[-1].stopped = True
        return runs

    def _samplers(self, server: ServerProcesses) -> tuple[GpuSampler | None, MetricsSampler | None]:
        """Return samplers of the GPUs, if the server runs here and has any, and of its metrics, if configured."""
        plan = self.plan
        reader = GpuReader() if server.pids else None
        metrics = MetricsSampler(plan.metrics_url, plan.metrics_interval) if plan.metrics_url else None
        return GpuSampler(reader) if reader is not None and reader.handles else None, metrics

    def _warm_up(self, level: float) -> None:
        """Start the warm-up requests of the plan, or requests that continue until the level ends."""
        plan = self.plan
        if plan.warm_up_requests:
            self._start(level, plan.warm_up_requests)
            ended, last_response = 0, monotonic()
            while ended < plan.warm_up_requests and monotonic() - last_response < _WARM_UP_SILENCE:
                sleep(_CHECK_SECONDS)
                if (now := self._generators.progress()) > ended:
                    ended, last_response = now, monotonic()
        if not plan.total_requests:
            self._start(level)

    def _load(self, level: float) -> None:
        """Start the measured requests if the plan limits their number; otherwise requests run since the warm-up."""
        if self.plan.total_requests:
            self._start(level, self.plan.total_requests)

    def _start(self, level: float, requests: int = 0) -> None:
        plan = self.plan
        if plan.rates is None:
            self._generators.run_closed(int(level), requests)
            return
        # Each run has its own arrivals: runs that share them would agree more than they should.
        self._starts += 1
        schedule: Schedule = Poisson(level, self._starts) if plan.distribution == "poisson" else Constant(level)
        if plan.intervals:
            schedule = Intervals(plan.intervals)
        self._generators.run_open(schedule, monotonic_ns(), plan.callers, requests)

    def _end(self) -> None:
        """End the sending processes; first let requests and sequences complete if the server keeps state of them.

        Otherwise the server would wait for the rest of a sequence, and for requests that use a shared memory region
        before it unregisters the region.
        """
        if self._leaves_traces and not self._gone():
            with suppress(ConchError):
                self._rest()
        self._generators.close()

    def _rest(self) -> None:
        """Start no more requests, and wait for those in flight."""
        self._generators.pause()
        until = monotonic() + _REST_SECONDS
        while self._generators.collect().unfinished.count and monotonic() < until:
            sleep(0.02)

    def _gone(self) -> str:
        try:
            self.plan.address.check_listens()
        except ConchError as error:
            return error.message
        return ""

    def _statistics(self) -> list[Any]:
        """Return the server's statistics; after one failure, none are requested for the rest of the level."""
        try:
            return list(self._api.statistics()) if self._counts else []
        except ConchError:
            self._counts = False
            return []

    def _processes(self) -> int:
        plan = self.plan
        if plan.processes:
            # With a request rate, each sending process needs at least one caller.
            return plan.processes if plan.rates is None else min(plan.processes, plan.callers)
        return int(max(1, min(usable_cores(), plan.callers // CALLERS_PER_PROCESS)))
