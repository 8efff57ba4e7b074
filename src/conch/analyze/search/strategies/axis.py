"""The loads at which candidates are compared: callers at a time, or requests a second.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import violations
from conch.analyze.results import Point

#: Latencies come this close to a bound when the load is chosen by what a higher one gave.
_NEAR: Final = 0.95
#: The figures that less load makes better.
WAITING: Final = ("latency_", "client_wait", "queue")


class LoadAxis:
    """The range of loads; ``given`` are the user's, and then there are no others."""

    def __init__(self, least: float, most: float, given: Sequence[float] = (), *, rates: bool = False) -> None:
        """``rates`` says that loads are requests a second."""
        self.least, self.most, self.given, self.rates = least, most, tuple(given), rates

    def fitting(self, parallelism: int, shift: int = 0) -> float:
        """The load for a candidate that computes so many inferences at a time, times 2 to the power ``shift``.

        Twice as many callers keep every instance busy: while one batch is computed, the next gathers.  (Model
        analyzer's quick search takes the same.)  Of given rates it is the highest, which shows what a candidate can do.
        """
        wanted = 2.0 * parallelism if not self.rates else max(self.given, default=self.most)
        return self._allowed(wanted * 2.0**shift)

    def corrected(self, load: float, point: Point, goals: Goals) -> float | None:
        """A lower load that probably keeps the bounds of latency; None where latency is not what is wrong.

        Callers who wait for answers see latency in proportion to their number (Little's law).  At a rate above what a
        server can do latency has no bound, so a rate just below that is next.
        """
        shares = [
            one.constraint.maximum / one.value
            for one in violations(point, goals)
            if one.constraint.metric.startswith(WAITING) and one.value and one.constraint.maximum is not None
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
