"""The loop that measures one level: takes windows until they are stable or more of them would not help.

Runs in the measuring process, while other processes send. The clock and the sleep function are arguments, so that tests
do not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.machine.facts import MachineFacts, load_average
from conch.machine.memory import ProcessReader, seconds_throttled
from conch.machine.processes import CpuClocks, Interference, InterferenceMeter, ProcessTimes
from conch.measure.perf.figures import WINDOWS, Stability, WindowFigures, figures_of
from conch.measure.perf.measured import MachineFigures
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.senders.generator import Generators
from conch.measure.perf.senders.records import Collected, Recording, Span
from conch.measure.perf.server.resources import ResourceFigures, ServerProcesses

#: Maximum age of the server's memory figure (s).
_MEMORY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class WindowReading:
    """The state of the machine during a window: interference, and the server's average cores and memory (bytes)."""

    interference: Interference
    cores: float = 0.0
    memory: int = 0


class MachineWatch:
    """Watches the machine and the server; neither the senders nor the server count as interference."""

    def __init__(self, server: ServerProcesses) -> None:
        own = os.getpid()
        # A server in this process, as in tests, cannot be distinguished from the senders.
        self._server = () if own in server.pids else server.pids
        self.unseen = server.unseen
        self._facts = MachineFacts.read()
        self._load_before = load_average()
        self._started = monotonic()
        # The server's group comes first, because the measuring process may have started the server.
        self._times = ProcessTimes([self._server, (own,)])
        self._reader = ProcessReader(load_nvml=_no_nvml)
        #: Time of the last reading of the server's memory (s, monotonic), and the memory (bytes).
        self._memory = (-_MEMORY_SECONDS, 0)
        self._used = (monotonic(), 0.0)
        self._meter = InterferenceMeter(self._clocks)

    def since_last(self) -> WindowReading:
        """Return the reading since the last call."""
        before = self._used
        interference = self._meter.since_last()
        if self.unseen:
            interference = replace(interference, others=0.0)
        wall = self._used[0] - before[0]
        cores = (self._used[1] - before[1]) / wall if wall > 0 else 0.0
        return WindowReading(interference, cores, self._resident())

    def machine(self, readings: Sequence[WindowReading]) -> MachineFigures:
        """Return the figures of the machine over the windows of ``readings``."""
        return MachineFigures(
            self._facts, self._load_before, load_average(), _mean(reading.interference for reading in readings),
            () if self.unseen else self._times.rivals(monotonic() - self._started), self.unseen,
        )  # fmt: skip

    def resources(self, readings: Sequence[WindowReading]) -> ResourceFigures | None:
        """Return the server's resources over the windows of ``readings``; None if its processes were not found."""
        if not self._server or not readings:
            return None
        return ResourceFigures(
            fmean(reading.cores for reading in readings), max(reading.memory for reading in readings)
        )

    def _resident(self) -> int:
        """Return the server's memory, read at intervals because the kernel scans all its pages for each reading."""
        now = monotonic()
        if now - self._memory[0] >= _MEMORY_SECONDS:
            [memory] = self._reader.read([self._server])
            self._memory = (now, memory.host)
        return self._memory[1]

    def _clocks(self) -> CpuClocks:
        server, own = self._times.read()
        self._used = (monotonic(), server)
        return replace(CpuClocks.read(server + own), throttled=_throttled(self._server))


def _throttled(pids: Iterable[int]) -> float:
    """Return for how long the control groups of this process and of ``pids`` were throttled (s), each group once."""
    groups: dict[str, int] = {}
    for process in (os.getpid(), *pids):
        with suppress(OSError):
            groups.setdefault((Path("/proc") / str(process) / "cgroup").read_text(), process)
    return sum(seconds_throttled(process) for process in groups.values())


def _mean(all_of: Iterable[Interference]) -> Interference:
    readings = list(all_of)
    if not readings:
        return Interference()
    return Interference(
        fmean(reading.others for reading in readings),
        fmean(reading.stolen for reading in readings),
        fmean(reading.throttled for reading in readings),
    )


def _no_nvml() -> Any:
    """Disable NVML here: :class:`~conch.measure.perf.server.resources.GpuSampler` reads the GPUs."""
    raise ImportError


#: A shorter silence (s) may be a single slow response, however many windows it spans.
_SILENCE_SECONDS: Final = 5.0
#: Interval at which the number of completed requests of a window is checked (s).
_CHECK_SECONDS: Final = 0.05
#: Interval at which senders hand over their records in a long window (s); they neither send nor read while they do.
_HAND_OVER_SECONDS: Final = 1.0

#: Receives the figures of each window; ends the level by returning True.
OnWindow = Callable[[WindowFigures], object]


#: Receives the senders' records at the end of each window, and during long ones.
OnCollected = Callable[[Collected], object]


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One window: its span, figures, machine reading, and the server's statistics before and after it."""

    span: Span
    figures: WindowFigures
    reading: WindowReading
    statistics: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class LevelEnvironment:
    """The functions that a level uses in addition to the senders.

    ``statistics`` returns the server's statistics, ``reading`` the state of the machine since its last call, and
    ``gone`` the reason why the server cannot be reached (empty if it can). ``begin`` is called when the measured part
    begins, and ``on_collected`` with all records of the senders.
    """

    statistics: Callable[[], Sequence[Mapping[str, Any]]]
    reading: Callable[[], WindowReading]
    gone: Callable[[], str]
    clock: Callable[[], int] = monotonic_ns
    sleep: Callable[[float], None] = sleep
    begin: Callable[[], None] = lambda: None
    on_collected: OnCollected = lambda collected: None


class LevelRun:
    """One run of a level, which :meth:`take` performs."""

    def __init__(
        self, plan: PerfPlan, senders: Generators, environment: LevelEnvironment, inferences: NDArray[np.int64]
    ) -> None:
        self.windows: list[MeasuredWindow] = []
        self.stability = Stability(plan.share, plan.trials)
        self._since = environment.clock()
        self.recording = Recording(self._since, self._since)
        #: The reason why the server can no longer be reached; empty while it can.
        self.gone = ""
        #: Whether the run ended early, and whether the user ended it.
        self.stopped = self.interrupted = False
        self._last_end = 0
        self._plan = plan
        self._senders = senders
        self._around = environment
        self._inferences = inferences

    def take(self, on_window: OnWindow) -> None:
        """Warm up, and take windows. Raises KeyboardInterrupt only before the first window is complete."""
        try:
            self._around.sleep(self._plan.warm_up)
            self._begin()
            while not self._over():
                window = self._window()
                self.windows.append(window)
                disturbed = window.reading.interference.disturbs
                self.stability.add(
                    window.figures.throughput, window.figures.judged(self._plan.percentile) or 0.0, disturbed=disturbed
                )
                if on_window(window.figures) is True:
                    self.stopped = True
                    return
        except KeyboardInterrupt:
            if not self.windows:
                raise
            self.stopped = self.interrupted = True

    @property
    def counted(self) -> list[MeasuredWindow]:
        """The windows that count; after the loss of the server, those without failures if there are any."""
        counted = [self.windows[number] for number in self.stability.counted]
        whole = [window for window in counted if not window.figures.failures]
        return whole or counted if self.gone else counted

    def figures(self) -> WindowFigures:
        """Return the figures of the windows that count."""
        return self._figures([window.span for window in self.counted])

    def _begin(self) -> None:
        self._statistics = self._around.statistics()
        self._around.reading()
        self._senders.collect()  # discards the records of the warm-up
        # The clock is read last: the time of the calls above would be part of the first window, before any request of
        # it.
        self._start = self._around.clock()
        self.recording = Recording(self._start, self._since)
        self._around.begin()

    def _window(self) -> MeasuredWindow:
        completed = self._wait()
        # A fixed number of requests ends with the last of them, not at the next check.
        end = self._last_end if self._plan.total_requests and completed else 0
        span = (self._start, end if end > self._start else self._around.clock())
        self._start = span[1]
        self._collect()
        before, self._statistics = self._statistics, self._around.statistics()
        reading = self._around.reading()
        return MeasuredWindow(span, self._figures([span], reading), reading, (before, self._statistics))

    def _wait(self) -> bool:
        """Wait until the window has its length or its number of requests; return whether it has.

        Returns False if requests are pending and none completes for some time.
        """
        plan, around = self._plan, self._around
        if not plan.requests:
            left = plan.interval
            while left > _HAND_OVER_SECONDS:
                around.sleep(_HAND_OVER_SECONDS)
                self._collect()
                left -= _HAND_OVER_SECONDS
            around.sleep(left)
            return True
        ended, last_response = 0, self._start
        silence = max(plan.interval, _SILENCE_SECONDS) * (WINDOWS if plan.total_requests else 1) * 1e9
        while ended < plan.requests and around.clock() - last_response < silence:
            around.sleep(_CHECK_SECONDS)
            completed = self._collect()
            ended += completed
            if completed or not self.recording.unfinished.count:  # no request is due yet
                last_response = around.clock()
        return ended >= plan.requests

    def _collect(self) -> int:
        """Collect the senders' records; return the number of requests that completed."""
        collected = self._senders.collect()
        records = self.recording.add(collected, self._around.clock())
        self._around.on_collected(collected)
        if len(records):
            # A sending process may hand over its records later than another one that has newer records.
            self._last_end = max(self._last_end, int(records["end"].max()))
        return len(records)

    def _over(self) -> bool:
        """Whether to stop taking windows: they are stable, the server does not respond, or every request has failed."""
        silent = self.stability.silent
        if silent:
            self.gone = self._around.gone()
            seconds = sum(window.figures.seconds for window in self.windows[-silent:])
            only_failures = all(window.figures.failures for window in self.windows) and silent == len(self.windows)
            if self.gone or ((silent >= WINDOWS or only_failures) and seconds >= _SILENCE_SECONDS):
                return True
        return self.stability.over

    def _figures(self, spans: Sequence[Span], reading: WindowReading | None = None) -> WindowFigures:
        records, _ = self.recording.within(spans)
        interference = reading.interference if reading is not None else None
        return figures_of(records, spans, self._inferences, self._plan.percentiles, interference)
