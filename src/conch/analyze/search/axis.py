"""The loads at which candidates are compared: callers at a time, or requests a second.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, sqrt
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import violations
from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.results import Point

#: Latencies come this close to a bound when the load is chosen by what a higher one gave.
_NEAR: Final = 0.95
#: Loads whose ratio is less than this are not worth another measurement between them.
FINEST: Final = 1.15
#: The figures that less load makes better.
WAITING: Final = ("latency_", "client_wait", "queue")


class LoadAxis:
    """The range of loads; ``given`` are the user's, and then there are no others."""

    def __init__(self, least: float, most: float, given: Sequence[float] = (), *, rates: bool = False) -> None:
        """``rates`` says that loads are requests a second."""
        self.least, self.most, self.given, self.rates = least, most, tuple(given), rates

    def fitting(self, parallelism: int) -> float:
        """The load at which a candidate that computes so many inferences at a time is busy.

        Twice as many callers keep every instance busy: while one batch is computed, the next gathers.  (Model
        analyzer's quick search takes the same.)  Of rates it is the highest.
        """
        return self._allowed(2.0 * parallelism if not self.rates else self.most)

    def more(self, load: float) -> float | None:
        """The next higher load: twice as much, or the next one given; None at the end."""
        if self.given:
            return min((one for one in self.given if one > load), default=None)
        return self.bounded(2 * load) if load < self.most else None

    def less(self, load: float) -> float | None:
        """The next lower load: half as much, or the next one given; None at the end."""
        if self.given:
            return max((one for one in self.given if one < load), default=None)
        return self._allowed(load / 2) if load > self.least else None

    def between(self, low: float, high: float) -> float | None:
        """A load between two others; None if they are too close to distinguish."""
        if self.given or high / low < FINEST:
            return None
        middle = sqrt(low * high) if self.rates else float(round(sqrt(low * high)))
        return middle if low < middle < high else None

    def corrected(self, load: float, point: Point, goals: Goals) -> float | None:
        """A lower load that probably keeps the bounds of latency; None where latency is not what is wrong.

        Callers who wait for answers see latency in proportion to their number (Little's law).  At a rate above what a
        server can do latency has no bound, so a rate just below that is next.
        """
        shares = [
            violation.constraint.maximum / violation.value
            for violation in violations(point, goals)
            if violation.constraint.metric.startswith(WAITING)
            and violation.value
            and violation.constraint.maximum is not None
        ]
        if not shares or load <= self.least:
            return None
        wanted = min(0.7 * load, 0.9 * point.throughput) if self.rates else load * min(shares) * _NEAR
        lower = self._allowed(wanted)
        return lower if lower < load else None

    def climb(self, highest: float) -> int:
        """How many loads are probably measured where throughput grows up to ``highest``: doubled from the least on,
        until then and two more."""
        if self.given:
            return len(self.given)
        last = min(4 * self.bounded(highest), self.most)
        return 1 + ceil(log2(max(1.0, last / self.least)))

    def bounded(self, load: float) -> float:
        """The load in the range that is next to another."""
        return max(self.least, min(self.most, load))

    def _allowed(self, load: float) -> float:
        if self.given:
            below = [one for one in self.given if one <= load]
            return max(below, default=min(self.given))
        bounded = self.bounded(load)
        return bounded if self.rates else float(max(1, int(bounded)))


def axis_of(settings: AnalyzeSettings, models: Sequence[str]) -> LoadAxis:
    """The loads of models that are measured together: those of the settings, or of the first model that has its own."""
    own = [settings.model(name) for name in models]
    if settings.loads_are_rates or any(one.request_rate for one in own):
        rates = next((one.request_rate for one in own if one.request_rate), settings.request_rate)
        least, most = settings.run_config_search_min_request_rate, settings.run_config_search_max_request_rate
        return LoadAxis(least, most, rates, rates=True)
    callers = next((one.concurrency for one in own if one.concurrency), settings.concurrency)
    least, most = settings.run_config_search_min_concurrency, settings.run_config_search_max_concurrency
    return LoadAxis(float(least), float(most), tuple(map(float, callers)))
