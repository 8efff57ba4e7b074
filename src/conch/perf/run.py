"""Takes a measurement: asks the server about the model, and measures level after level.

Called by the command and by the analyzer; the processes that send do nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.backends.base.threads import usable_cores
from conch.errors import ConchError, invalid
from conch.perf.figures.confidence import confidence_of
from conch.perf.figures.generation import generation_of
from conch.perf.figures.latency import figures_of
from conch.perf.inputs.specs import ModelSpec, read_model
from conch.perf.level import LevelEnvironment, LevelRun, OnCollected, OnWindow
from conch.perf.measured import LevelRecords, MachineFigures, Measured
from conch.perf.plan import Levels, PerfPlan
from conch.perf.requests.shared_memory import MemoryLayout, SharedRegion
from conch.perf.senders.generator import Generators
from conch.perf.senders.limit import SenderLimit
from conch.perf.senders.records import join_events
from conch.perf.senders.schedule import Constant, Intervals, Poisson, Schedule
from conch.perf.server.api import GrpcApi, HttpApi, ServerApi, check_listens
from conch.perf.server.gpus import GpuReader, GpuSampler
from conch.perf.server.metrics import MetricsSampler
from conch.perf.server.processes import ServerProcesses, find_server
from conch.perf.server.resources import MetricFigures, ResourceFigures
from conch.perf.server.stages import METRICS_PORT, StageReader
from conch.perf.server.statistics import added, differences
from conch.perf.traffic import traffic_of
from conch.perf.watching import MachineWatch


class LevelSearch:
    """Levels in turn, each chosen once the one before was measured and noted; as perf_analyzer searches.

    ``limit`` (s, 0: none) ends a search from level to level.  A search by halves goes on until levels are closer than
    the step.
    """

    def __init__(self, levels: Levels, limit: float = 0.0, *, binary: bool = False) -> None:
        """Raises INVALID_ARG for a search that would not end."""
        if binary and not (limit and levels.last > levels.first):
            raise invalid(
                "--binary-search looks for the highest load below --latency-threshold from start to end: give both"
            )
        if not levels.last and not limit:
            raise invalid("a range whose end is 0 goes on until --latency-threshold is reached: give that")
        self._levels, self._limit, self._binary = levels, limit, binary
        self._within: bool | None = None

    def __iter__(self) -> Iterator[float]:
        return self._halves() if self._binary else self._steps()

    def note(self, latency: float | None) -> None:
        """The latency (s) at the level that came last; None where nothing was answered."""
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


#: More callers than this are worth a second process, and so on.
CALLERS_PER_PROCESS: Final = 128
#: How long requests of a level that is over may take to end before the next one begins all the same (s).
_REST_SECONDS: Final = 5.0
#: How often it is looked whether a warm-up is over (s).
_LOOK_SECONDS: Final = 0.02
#: A server that has not answered for so long during a warm-up is measured as it is (s), which then says that it hangs.
_WARM_UP_SILENCE: Final = 60.0


class Measurement:
    """A server, a model and its requests, ready to be measured; ends the processes that send when it is closed.

    Raises UNAVAILABLE without a server, NOT_FOUND without the model, INVALID_ARG for data that it does not take.
    """

    def __init__(self, plan: PerfPlan, prefix: str = "") -> None:
        self.plan = plan
        self._search = LevelSearch(plan.rates or plan.concurrency, plan.latency_limit, binary=plan.binary_search)
        self.server: Mapping[str, Any] = {}
        with ExitStack() as closing:  # what was begun is ended where the rest goes wrong
            self._prepare(prefix, closing)
            self._closing = closing.pop_all()

    def _prepare(self, prefix: str, closing: ExitStack) -> None:
        plan = self.plan
        self._api: ServerApi
        if plan.protocol == "grpc":
            self._api = closing.enter_context(GrpcApi(plan.address, plan.headers))
        else:
            self._api = HttpApi(plan.address, prefix, plan.headers)
        self.model = ModelSpec(plan.model, plan.version, {}, 0, decoupled=True)
        if plan.protocol == "openai":
            check_listens(plan.address)
            with suppress(ConchError):  # another server may have nothing but OpenAI's API
                self.server = self._api.server()
        else:
            self.server = self._api.server()
            metadata = self._api.metadata(plan.model, plan.version)
            self.model = read_model(metadata, self._api.config(plan.model, plan.version), plan.version)
            for name, version in plan.composing.items():
                self._api.metadata(name, version)
        memory = MemoryLayout.of(self.model, plan.batch_size, plan.output_size) if plan.shared_memory else None
        traffic = traffic_of(plan, self.model, prefix, memory)
        #: What requests have, in words.
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
        """What reads how long the model's workers took for each stage; the server's own port for metrics by default."""
        default = f"http://{replace(self.plan.address, port=METRICS_PORT).shown}/metrics"
        return StageReader(metrics_url or default, self._api, self.plan.model)

    def levels(self) -> Iterator[float]:
        """The levels of the plan: callers at a time, or requests a second."""
        return iter(self._search)

    def measure(
        self,
        level: float,
        on_window: OnWindow = lambda window: None,
        before_rest: Callable[[], object] = lambda: None,
        on_collected: OnCollected = lambda collected: None,
    ) -> Measured:
        """Measure one level, as often as the plan says.

        ``on_window`` is told of each window, and ends the level by answering True.  So does KeyboardInterrupt, which is
        raised only where no window has ended yet.  ``on_collected`` is told of all requests as they are collected.
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
        observed = Observed(
            watch.machine([window.reading for window in counted]),
            used,
            metrics.figures(spans) if metrics else {},
            limit,
        )
        measured = sum_up(self.plan, level, runs, self._inferences, observed, writes_text=self._writes_text)
        measured = replace(measured, sent=self.sent)
        self._search.note(measured.figures.judged(self.plan.percentile))
        return measured

    def _runs(
        self, level: float, around: LevelEnvironment, on_window: OnWindow, before_rest: Callable[[], object]
    ) -> list[LevelRun]:
        """The runs of a level, one at least; fewer than planned where one was ended before its time."""
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
        except KeyboardInterrupt:  # also between runs, and while requests end
            if not runs:
                raise
            runs[-1].stopped = True
        return runs

    def _samplers(self, server: ServerProcesses) -> tuple[GpuSampler | None, MetricsSampler | None]:
        """What looks at GPUs, if the server is here and there are any, and at the server's metrics, if it is to."""
        plan = self.plan
        reader = GpuReader() if server.pids else None
        metrics = MetricsSampler(plan.metrics_url, plan.metrics_interval) if plan.metrics_url else None
        return GpuSampler(reader) if reader else None, metrics

    def _warm_up(self, level: float) -> None:
        """Start requests: so many as the plan wants for a warm-up, or those that go on until the level is over."""
        plan = self.plan
        if plan.warm_up_requests:
            self._start(level, plan.warm_up_requests)
            ended, answered = 0, monotonic()
            while ended < plan.warm_up_requests and monotonic() - answered < _WARM_UP_SILENCE:
                sleep(_LOOK_SECONDS)
                if (now := self._generators.progress()) > ended:
                    ended, answered = now, monotonic()
        if not plan.total_requests:
            self._start(level)

    def _load(self, level: float) -> None:
        """What is measured begins: where the plan says how many requests, those."""
        if self.plan.total_requests:
            self._start(level, self.plan.total_requests)

    def _start(self, level: float, requests: int = 0) -> None:
        plan = self.plan
        if plan.rates is None:
            self._generators.run_closed(int(level), requests)
            return
        # Arrivals of their own for each run: runs that share them would agree more than they should.
        self._starts += 1
        schedule: Schedule = Poisson(level, self._starts) if plan.distribution == "poisson" else Constant(level)
        if plan.intervals:
            schedule = Intervals(plan.intervals)
        self._generators.run_open(schedule, monotonic_ns(), plan.callers, requests)

    def _end(self) -> None:
        """End the processes that send; where the server keeps something of them, let requests and sequences end before.

        It would wait for the rest of a sequence, and for requests that use a region before it forgets that.
        """
        if self._leaves_traces and not self._gone():
            with suppress(ConchError):
                self._rest()
        self._generators.close()

    def _rest(self) -> None:
        """Start no more requests, and wait for those that run."""
        self._generators.pause()
        until = monotonic() + _REST_SECONDS
        while self._generators.collect().unfinished.count and monotonic() < until:
            sleep(0.02)

    def _gone(self) -> str:
        try:
            check_listens(self.plan.address)
        except ConchError as error:
            return error.message
        return ""

    def _statistics(self) -> list[Any]:
        """What the server has counted; it is not asked again, in this level, once it did not tell."""
        try:
            return list(self._api.statistics("", "")) if self._counts else []
        except ConchError:
            self._counts = False
            return []

    def _processes(self) -> int:
        plan = self.plan
        if plan.processes:
            # One that is to start requests needs a call for them.
            return plan.processes if plan.rates is None else min(plan.processes, plan.callers)
        return int(max(1, min(usable_cores(), plan.callers // CALLERS_PER_PROCESS)))
