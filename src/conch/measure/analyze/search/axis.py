"""The loads at which candidates are compared: concurrent callers, or requests per second.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log2, sqrt
from typing import Final

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.objectives import violations
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.results import Point

#: Target of a latency as a fraction of its bound when a load is corrected from a higher one.
_NEAR: Final = 0.95
#: Loads with a smaller ratio are not worth another measurement between them.
FINEST: Final = 1.15
#: The figures that a lower load improves.
WAITING: Final = ("latency_", "client_wait", "queue")


class LoadAxis:
    """The range of loads; if the user gave ``loads``, only those are used."""

    def __init__(self, minimum: float, maximum: float, loads: Sequence[float] = (), *, rates: bool = False) -> None:
        """Create the range; ``rates`` is whether loads are requests per second."""
        self.minimum, self.maximum, self.loads, self.rates = minimum, maximum, tuple(loads), rates

    def fitting(self, parallelism: int) -> float:
        """Return the load that keeps a candidate busy; ``parallelism`` is its number of concurrent inferences.

        It is twice the number of concurrent inferences: while one batch is computed, the next one forms. (Model
        analyzer's quick search uses the same.) For rates, it is the highest rate.
        """
        return self._allowed(2.0 * parallelism if not self.rates else self.maximum)

    def more(self, load: float) -> float | None:
        """Return the next higher load: twice as high, or the next given one; None at the end."""
        if self.loads:
            return min((allowed for allowed in self.loads if allowed > load), default=None)
        return self.bounded(2 * load) if load < self.maximum else None

    def less(self, load: float) -> float | None:
        """Return the next lower load: half as high, or the next given one; None at the end."""
        if self.loads:
            return max((allowed for allowed in self.loads if allowed < load), default=None)
        return self._allowed(load / 2) if load > self.minimum else None

    def between(self, low: float, high: float) -> float | None:
        """Return a load between two others; None if they are too close to distinguish."""
        if self.loads or high / low < FINEST:
            return None
        middle = sqrt(low * high) if self.rates else float(round(sqrt(low * high)))
        return middle if low < middle < high else None

    def corrected(self, load: float, point: Point, goals: Goals) -> float | None:
        """Return a lower load that probably keeps the latency bounds; None if latency is not the problem.

        With concurrent callers, latency is proportional to their number (Little's law). At a request rate above the
        server's capacity latency is unbounded, so the result is a rate just below it.
        """
        shares = [
            violation.constraint.maximum / violation.value
            for violation in violations(point, goals)
            if violation.constraint.metric.startswith(WAITING)
            and violation.value
            and violation.constraint.maximum is not None
        ]
        if not shares or load <= self.minimum:
            return None
        target = min(0.7 * load, 0.9 * point.throughput) if self.rates else load * min(shares) * _NEAR
        lower = self._allowed(target)
        return lower if lower < load else None

    def climb(self, highest: float) -> int:
        """Estimate the number of loads of a climb: doubled from the lowest up to ``highest``, and two more."""
        if self.loads:
            return len(self.loads)
        last = min(4 * self.bounded(highest), self.maximum)
        return 1 + ceil(log2(max(1.0, last / self.minimum)))

    def bounded(self, load: float) -> float:
        """Limit a load to the range."""
        return max(self.minimum, min(self.maximum, load))

    def _allowed(self, load: float) -> float:
        if self.loads:
            below = [allowed for allowed in self.loads if allowed <= load]
            return max(below, default=min(self.loads))
        bounded = self.bounded(load)
        return bounded if self.rates else float(max(1, int(bounded)))


def axis_of(settings: AnalyzeSettings, models: Sequence[str]) -> LoadAxis:
    """Return the loads of models that are measured together: the first model's own loads, or those of the settings."""
    own = [settings.model(name) for name in models]
    if settings.loads_are_rates or any(model.request_rate for model in own):
        rates = next((model.request_rate for model in own if model.request_rate), settings.request_rate)
        minimum, maximum = settings.run_config_search_min_request_rate, settings.run_config_search_max_request_rate
        return LoadAxis(minimum, maximum, rates, rates=True)
    callers = next((model.concurrency for model in own if model.concurrency), settings.concurrency)
    minimum, maximum = settings.run_config_search_min_concurrency, settings.run_config_search_max_concurrency
    return LoadAxis(float(minimum), float(maximum), tuple(map(float, callers)))


# The load doubles from the lowest until throughput stops growing, or the constraints are violated. With constraints,
# a binary search follows between the last load that satisfied them and the first that did not.


#: Growth of throughput below this fraction counts as none: noise is about as large.
GROWTH: Final = 0.05
#: Number of successive loads without growth that end the climb; a single one may be an accident.
FLAT: Final = 2


class LoadClimb:
    """The loads of one candidate; if the user gave loads, only those are used."""

    def __init__(self, axis: LoadAxis, steps: int, *, early_exit: bool = False) -> None:
        """Start the climb.

        ``steps`` limits the binary search; ``early_exit`` ends given loads like automatic ones.
        """
        self._axis, self._steps = axis, steps
        self._all = bool(axis.loads) and not early_exit
        self._rising = list(axis.loads) or list(_doubled(axis.minimum, axis.maximum))
        self._throughput: dict[float, float] = {}
        self._kept: dict[float, bool] = {}

    def next(self) -> float | None:
        """Return the next load; None at the end."""
        done = [load for load in self._rising if load in self._throughput]
        if len(done) < len(self._rising) and (self._all or not self._over(done)):
            return self._rising[len(done)]
        return None if self._axis.loads else self._between()

    def add(self, load: float, throughput: float, kept: bool) -> None:
        """Record the throughput at a load (inferences per second), and whether the constraints are satisfied."""
        self._throughput[load] = throughput
        self._kept[load] = kept

    def _over(self, done: list[float]) -> bool:
        """Return whether a higher load gives no more throughput, or has violated the constraints."""
        if done and not self._kept[done[-1]] and any(self._kept[load] for load in done):
            return True
        rates = [self._throughput[load] for load in done]
        before, last = rates[:-FLAT], rates[-FLAT:]
        return bool(before) and all(rate < max(before) * (1 + GROWTH) for rate in last)

    def _between(self) -> float | None:
        """Return the midpoint between the highest load that satisfied the constraints and the next one that did not."""
        highest = max((load for load, kept in self._kept.items() if kept), default=None)
        above = [load for load, kept in self._kept.items() if not kept and highest is not None and load > highest]
        if highest is None or not above or self._steps <= 0:
            return None
        middle = (highest + min(above)) / 2
        middle = middle if self._axis.rates else float(int(middle))
        if middle in self._kept:
            return None
        self._steps -= 1
        return middle


def _doubled(minimum: float, maximum: float) -> Iterator[float]:
    load = minimum
    while load < maximum:
        yield load
        load *= 2
    yield maximum
