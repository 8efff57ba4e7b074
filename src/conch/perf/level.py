"""The loop of one level: windows until they agree, or until more of them would say no more.

Runs in the process that measures, while others send.  Clock and sleep are passed in, so that tests need no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns, sleep
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from conch.perf.figures.latency import WindowFigures, figures_of
from conch.perf.figures.stability import WINDOWS, Stability
from conch.perf.plan import PerfPlan
from conch.perf.senders.recording import Collected, Recording
from conch.perf.senders.records import Span
from conch.perf.watching import WindowReading

#: Silence of fewer seconds may be one slow answer, however many windows it lasts.
_SILENCE_SECONDS: Final = 5.0
#: How often it is looked whether a window has the requests that it needs (s).
_LOOK_SECONDS: Final = 0.05
#: How often the senders hand over what they noted in a long window (s): meanwhile they neither send nor read.
_HAND_OVER_SECONDS: Final = 1.0

#: Told of every window; ends the level by answering True.
OnWindow = Callable[[WindowFigures], object]


#: Told of what the senders noted, as windows end and within long ones.
OnCollected = Callable[[Collected], object]


class Senders(Protocol):
    """The processes that send."""

    def collect(self) -> Collected:
        """What they have noted since they were asked before."""


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One window: when it was, what it measured, what was seen of the machine, the server's statistics before it and
    after it."""

    span: Span
    figures: WindowFigures
    reading: WindowReading
    statistics: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class LevelEnvironment:
    """What a level asks besides the senders: ``statistics`` of the server, the ``reading`` of the machine since it was
    asked before, and ``gone``: why the server does not answer at all, empty while it does.  ``begin`` is called when
    what is measured begins, ``on_collected`` is told of all that the senders noted."""

    statistics: Callable[[], Sequence[Mapping[str, Any]]]
    reading: Callable[[], WindowReading]
    gone: Callable[[], str]
    clock: Callable[[], int] = monotonic_ns
    sleep: Callable[[float], None] = sleep
    begin: Callable[[], None] = lambda: None
    on_collected: OnCollected = lambda collected: None


class LevelRun:
    """One run of a level, which :meth:`take` carries out."""

    def __init__(
        self, plan: PerfPlan, senders: Senders, environment: LevelEnvironment, inferences: NDArray[np.int64]
    ) -> None:
        self.windows: list[MeasuredWindow] = []
        self.stability = Stability(plan.share, plan.trials)
        self._since = environment.clock()
        self.recording = Recording(self._since, self._since)
        #: Why the server does not answer any more, empty while it does.
        self.gone = ""
        #: Whether it was ended before its time, and whether by the user.
        self.stopped = self.interrupted = False
        self._last_end = 0
        self._plan = plan
        self._senders = senders
        self._around = environment
        self._inferences = inferences

    def take(self, on_window: OnWindow) -> None:
        """Warm up, and take windows.  Raises KeyboardInterrupt only before the first one has ended."""
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
        """The windows that count; of a server that is gone, not the one in which it went, if there are others."""
        counted = [self.windows[number] for number in self.stability.counted]
        whole = [window for window in counted if not window.figures.failures]
        return whole or counted if self.gone else counted

    def figures(self) -> WindowFigures:
        """The figures of the windows that count."""
        return self._figures([window.span for window in self.counted])

    def _begin(self) -> None:
        self._statistics = self._around.statistics()
        self._around.reading()
        self._senders.collect()  # what the warm-up has noted
        # Last: what takes time before it would be in a window of which the first request has yet to be sent.
        self._start = self._around.clock()
        self.recording = Recording(self._start, self._since)
        self._around.begin()

    def _window(self) -> MeasuredWindow:
        enough = self._wait()
        # Where a number of requests is all there is, it is over with the last of them, not when somebody looks.
        end = self._last_end if self._plan.total_requests and enough else 0
        span = (self._start, end if end > self._start else self._around.clock())
        self._start = span[1]
        self._collect()
        before, self._statistics = self._statistics, self._around.statistics()
        reading = self._around.reading()
        return MeasuredWindow(span, self._figures([span], reading), reading, (before, self._statistics))

    def _wait(self) -> bool:
        """Until the window is long enough, or has as many requests as the plan wants: returns whether it has those.

        It ends without them where requests wait and none is answered for a while.
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
        ended, heard = 0, self._start
        silence = max(plan.interval, _SILENCE_SECONDS) * (WINDOWS if plan.total_requests else 1) * 1e9
        while ended < plan.requests and around.clock() - heard < silence:
            around.sleep(_LOOK_SECONDS)
            found = self._collect()
            ended += found
            if found or not self.recording.unfinished.count:  # none is due yet
                heard = around.clock()
        return ended >= plan.requests

    def _collect(self) -> int:
        """How many requests have ended since."""
        collected = self._senders.collect()
        records = self.recording.add(collected, self._around.clock())
        self._around.on_collected(collected)
        if len(records):
            # One process of senders may hand over late what ended before what another has handed over.
            self._last_end = max(self._last_end, int(records["end"].max()))
        return len(records)

    def _over(self) -> bool:
        """Whether more windows would say no more: they agree, or nobody answers."""
        silent = self.stability.silent
        if silent:
            self.gone = self._around.gone()
            seconds = sum(window.figures.seconds for window in self.windows[-silent:])
            if self.gone or (silent >= WINDOWS and seconds >= _SILENCE_SECONDS):
                return True
        return self.stability.over

    def _figures(self, spans: Sequence[Span], reading: WindowReading | None = None) -> WindowFigures:
        records, _ = self.recording.within(spans)
        interference = reading.interference if reading is not None else None
        return figures_of(records, spans, self._inferences, self._plan.percentiles, interference)
