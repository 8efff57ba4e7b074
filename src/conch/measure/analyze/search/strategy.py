"""The interface of search strategies, which choose one measurement after another from the results so far.

Pure: a strategy neither measures nor reads a clock, and its choices depend only on the added results. An interrupted
search resumes when the points of its journal are added to a new strategy instead of being measured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from conch.measure.analyze.judging.ranking import FinalRounds
from conch.measure.analyze.results import Candidate, CandidateResult, Point
from conch.measure.analyze.search.axis import LoadAxis


class Trial(NamedTuple):
    """A measurement to make: a candidate at a load.

    ``rival`` is the point to beat if only a winner is of use; the measurement may then end early
    (:mod:`conch.measure.analyze.judging.objectives`). Without a rival it is completed. A repeated trial is measured
    again. ``finalist`` is the candidate of the final rounds that the trial belongs to; None in the search.
    """

    candidate: Candidate
    load: float
    rival: Point | None = None
    finalist: Candidate | None = None


class Strategy(Protocol):
    """A search and its final rounds; each trial from ``next`` is followed by one call of ``add`` or ``fail``."""

    def next(self) -> Trial | None:
        """Return the next trial; None when the search and the rounds are complete."""
        ...

    def add(self, trial: Trial, point: Point) -> None:
        """Add the point of a trial."""
        ...

    def fail(self, trial: Trial) -> None:
        """Record that the trial's candidate cannot be served or measured; its other loads are skipped."""
        ...

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that the next one needs to be useful.

        In the search, they include those that would compare its candidate with the default; at the start of a final
        round, they are the whole round. Within a round there are none, as a round is always completed.
        """
        ...

    def end_phase(self) -> None:
        """End the search and continue with the final rounds of the best candidate; end those if they have begun."""
        ...

    @property
    def expected(self) -> int:
        """The estimated total of measurements in the search and its final rounds."""
        ...

    @property
    def results(self) -> Sequence[CandidateResult]:
        """The points of the candidates in the search, the default first; candidates that failed may have none.

        Their configurations are included as far as they are known without a server.
        """
        ...

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far; None if there are none."""
        ...


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
        """Return the middle between the highest load that satisfied the constraints and the next one that did not."""
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
