"""Takes a measurement: asks the server about the model, sends at each level until windows agree, and sums them up.

Called by the command; the processes that send do nothing else.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic_ns, sleep
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.errors import ConchError
from conch.perf.figures import PERCENTILES, WindowFigures, figures_of
from conch.perf.generation import GenerationFigures, generation_of
from conch.perf.generator import Collected, Generators
from conch.perf.inputs.specs import ModelSpec, read_model
from conch.perf.plan import PerfPlan
from conch.perf.records import Records, join_events
from conch.perf.schedule import Constant, Poisson, Schedule
from conch.perf.server_api import GrpcApi, HttpApi, ServerApi
from conch.perf.server_side import ServerFigures, differences
from conch.perf.stability import WINDOWS, Stability
from conch.perf.traffic import traffic_of

#: A process that computes for more than this share of its time is what limits a measurement.
BUSY: Final = 0.85
#: More callers than this are worth a second process, and so on.
_CALLERS_PER_PROCESS: Final = 128


@dataclass(frozen=True, slots=True)
class Measured:
    """One level: ``figures`` over the windows that agree (the last ones, if none do), and what the server counted.

    ``generation`` is there where answers are text.

    ``stable`` says whether they agree; ``busy`` is how much of its time the busiest sender computed; ``errors`` counts
    what went wrong, by message; ``unfinished`` are requests that had not ended when the last window did, for at least
    ``oldest`` seconds.
    """

    level: float
    figures: WindowFigures
    generation: GenerationFigures | None
    windows: tuple[WindowFigures, ...]
    stable: bool
    server: tuple[ServerFigures, ...]
    errors: dict[str, int]
    busy: float
    unfinished: int
    oldest: float

    @property
    def warnings(self) -> Iterator[str]:
        """What casts doubt on the figures, in a sentence each."""
        if not self.figures.requests:
            yield "no request was answered"
        elif not self.stable:
            yield f"the last {WINDOWS} windows do not agree: measure longer (-p), or allow more (-s)"
        if self.busy > BUSY:
            yield (
                f"the senders computed for {self.busy:.0%} of the time, so the server may be faster than this shows:"
                " use more processes, or another machine"
            )
        failed = sum(self.figures.failures.values())
        if failed:
            yield f"{failed} of {failed + self.figures.requests} requests failed and are not among the latencies"


class Measurement:
    """A server, a model and its requests, ready to be measured; ends the processes that send when it is closed.

    Raises UNAVAILABLE without a server, NOT_FOUND without the model, INVALID_ARG for data that it does not take.
    """

    def __init__(self, plan: PerfPlan, prefix: str = "") -> None:
        self.plan = plan
        self._api: ServerApi = GrpcApi(plan.address) if plan.protocol == "grpc" else HttpApi(plan.address, prefix)
        self.server: Mapping[str, Any] = {}
        self.model = ModelSpec(plan.model, plan.version, {}, 0, decoupled=True)
        if plan.protocol == "openai":
            with suppress(ConchError):  # another server may have nothing but OpenAI's API
                self.server = self._api.server()
        else:
            self.server = self._api.server()
            metadata = self._api.metadata(plan.model, plan.version)
            self.model = read_model(metadata, self._api.config(plan.model, plan.version), plan.version)
        traffic = traffic_of(plan, self.model, prefix)
        self._inferences = np.array([payload.inferences for payload in traffic.payloads])
        self._writes_text = traffic.read is not None
        self._generators = Generators(traffic, self._processes())

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, *raised: object) -> None:
        self._generators.close()

    def levels(self) -> Iterator[float]:
        """The levels of the plan: callers at a time, or requests a second."""
        return iter(self.plan.rates or self.plan.concurrency)

    def measure(self, level: float, on_window: Callable[[WindowFigures], object] = lambda window: None) -> Measured:
        """Send at one level until windows agree; ``on_window`` is told of each."""
        plan = self.plan
        self._load(level)
        sleep(plan.warm_up)
        self._generators.collect()
        stability = Stability(plan.share, plan.trials)
        kept: list[tuple[WindowFigures, Records, int, int, NDArray[np.int64]]] = []
        errors: Counter[str] = Counter()
        busy = 0.0
        collected: Collected | None = None
        readings = [self._statistics()]
        while not stability.over:
            start = kept[-1][3] if kept else monotonic_ns()
            sleep(plan.interval)
            collected = self._generators.collect()
            end = monotonic_ns()
            readings.append(self._statistics())
            window = figures_of(collected.records, start, end, self._inferences, self._percentiles())
            kept.append((window, collected.records, start, end, collected.events))
            errors.update(collected.errors)
            busy = max(busy, collected.busy)
            stability.add(window.throughput, self._judged(window))
            on_window(window)
        last = kept[-WINDOWS:]
        records = np.concatenate([one[1] for one in last])
        now = last[-1][3]
        figures = figures_of(records, last[0][2], now, self._inferences, self._percentiles())
        generation = None
        if self._writes_text:
            generation = generation_of(
                records, join_events((one[1], one[4]) for one in last), last[0][2], now, plan.objective
            )
        unfinished = collected.unfinished if collected is not None else []
        return Measured(
            level, figures, generation, tuple(one[0] for one in kept), stability.stable,
            tuple(differences(readings[-len(last) - 1], readings[-1])), errors, busy, len(unfinished),
            max((now - due for _, due in unfinished), default=0) / 1e9,
        )  # fmt: skip

    def _load(self, level: float) -> None:
        plan = self.plan
        if plan.rates is None:
            self._generators.run_closed(int(level))
            return
        schedule: Schedule = Poisson(level) if plan.distribution == "poisson" else Constant(level)
        self._generators.run_open(schedule, monotonic_ns(), plan.max_calls)

    def _judged(self, window: WindowFigures) -> float:
        if window.latency is None:
            return 0.0
        return window.latency.percentiles[self.plan.percentile] if self.plan.percentile else window.latency.average

    def _percentiles(self) -> tuple[float, ...]:
        asked = (self.plan.percentile,) if self.plan.percentile else ()
        return tuple(sorted({*PERCENTILES, *asked}))

    def _statistics(self) -> list[Any]:
        with suppress(ConchError):
            return list(self._api.statistics("", "")) if self.server else []
        return []

    def _processes(self) -> int:
        plan = self.plan
        if plan.processes:
            return plan.processes
        callers = plan.max_calls if plan.rates is not None else plan.concurrency.last
        return int(max(1, min(os.cpu_count() or 1, callers // _CALLERS_PER_PROCESS)))
