"""What a search knows so far: the points of each candidate, which of them is best, and at which loads it is measured.

Pure.  Its generators are parts of those that :class:`conch.analyze.search.strategies.stepwise.Stepwise` drives.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from math import inf, log
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import Worth, satisfied, valid, worth
from conch.analyze.results import Candidate, Point
from conch.analyze.search.overrides import key
from conch.analyze.search.space import Choice, SearchSpace
from conch.analyze.search.strategies.axis import WAITING, LoadAxis
from conch.analyze.search.strategies.strategy import Trial

#: How often a candidate that breaks a bound of latency is given less load; each time comes close to the bound.
_CORRECTIONS: Final = 2
#: How many rates a candidate is measured at, and the ratio of two rates that is not worth a measurement.
_RATES: Final = 16
_FINER: Final = 1.03
#: Where the load may be, in powers of two beside the one that fits.
SHIFTS: Final = range(-6, 2)


class Exploration:
    """The points measured so far.  No trial is made twice."""

    def __init__(self, space: SearchSpace, goals: Goals, axis: LoadAxis) -> None:
        self.space = space
        self.goals = goals
        self.axis = axis
        self.best: Candidate | None = None
        self.candidates: dict[str, Candidate] = {}
        self.points: dict[str, dict[float, Point]] = {}
        self._failed: set[str] = set()
        #: Of the candidates that were looked at (:meth:`SearchSpace.key_of`).
        self._keys: set[str] = set()
        self._reference: Point | None = None

    @property
    def count(self) -> int:
        """How many points there are."""
        return sum(map(len, self.points.values()))

    @property
    def load_matters(self) -> bool:
        """Whether an objective may be better with less load than keeps every instance busy."""
        objectives = [one for wanted in self.goals.models.values() for one in wanted.objectives]
        return any(one.metric.startswith(WAITING) for one in objectives)

    def measure(
        self, candidate: Candidate, load: float, *, rival: Point | None = None
    ) -> Generator[Trial, Point | None, Point | None]:
        """Measure a candidate at a load, once; None where it cannot be."""
        known = self.points.setdefault(candidate.name, {})
        self.candidates[candidate.name] = candidate
        self._keys.add(key(candidate.overrides))
        if load in known or candidate.name in self._failed:
            return known.get(load)
        point = yield Trial(candidate, load, rival)
        if point is None:
            self._failed.add(candidate.name)
            return None
        known[load] = point
        if self._reference is None and valid(point):
            self._reference = point
        if self.best is None or self.worth(candidate) > self.worth(self.best):
            self.best = candidate
        return point

    def evaluate(self, candidate: Candidate, shift: int = 0) -> Generator[Trial, Point | None, Worth]:
        """Measure a candidate at the load that fits it, ``shift`` steps from there, and at less where that breaks a
        bound of latency but could win: the worth of its best point.

        Of rates, the highest that it takes is searched, where that is more than the best one's.
        """
        if self.axis.rates and not self.axis.given:
            if not self.points.get(candidate.name):
                yield from self._rates(candidate)
            return self.worth(candidate)
        load = self.axis.fitting(self.space.parallelism(candidate), shift)
        for _ in range(1 + _CORRECTIONS):
            rival = self.best_point()
            point = yield from self.measure(candidate, load, rival=rival)
            if point is None or satisfied(point, self.goals) or not self._could_win(point, rival):
                break
            lower = self.axis.corrected(load, point, self.goals)
            if lower is None:
                break
            load = lower
        return self.worth(candidate)

    def keeps(self, point: Point) -> bool:
        """Whether a point is valid and keeps the constraints."""
        return satisfied(point, self.goals)

    def _rates(self, candidate: Candidate) -> Generator[Trial, Point | None, None]:
        """Find the highest rate that a candidate takes: from a little more than the best one took, which shows at once
        who is no better, doubled until the server does not follow or breaks a bound, and then searched between."""
        rival = self.best_point()
        rate = self.axis.bounded(rival.load * _FINER if rival is not None else self.axis.least)
        kept, broken = rival.load if rival is not None else 0.0, inf
        for _ in range(_RATES):
            point = yield from self.measure(candidate, rate)
            if point is None:
                return
            follows = point.throughput * _FINER >= rate
            if self.keeps(point) and follows:
                kept = rate
            else:
                broken = rate
            if (rival is not None and kept == rival.load) or (kept and broken / kept < _FINER**2):
                return
            wanted = (kept + broken) / 2 if kept and broken < inf else 2 * kept if kept else rate / 2
            rate = self.axis.bounded(wanted)
            if rate in self.points[candidate.name]:
                return

    def best_point(self) -> Point | None:
        """The best point of the best candidate, where it keeps the constraints."""
        point = self._best_of(self.best) if self.best is not None else None
        return point if point is not None and satisfied(point, self.goals) else None

    def worth(self, candidate: Candidate) -> Worth:
        """The worth of a candidate's best point."""
        point = self._best_of(candidate)
        return worth(point, self._reference, self.goals)

    @property
    def best_height(self) -> float:
        """The worth of the best candidate as one number."""
        return self.height(self.best) if self.best is not None else -inf

    def height(self, candidate: Candidate) -> float:
        """The worth of a candidate as one number: above 0 where it keeps the constraints, by its score."""
        found = self.worth(candidate)
        return log(found.score) + 100 if found.satisfied and found.score > 0 else -min(found.excess, 1e6)

    def known(self, choice: Choice) -> bool:
        """Whether the candidate of a choice was measured, or could not be."""
        return self.space.key_of(choice) in self._keys

    def unseen(self, choices: Iterable[Choice]) -> float:
        """How many measurements it probably takes to look at those of the choices that nobody has looked at."""
        new = {self.space.key_of(choice) for choice in choices} - self._keys
        return len(new) * max(1.0, self.count / max(1, len(self.points)))

    def climb(self) -> float:
        """How many measurements it probably takes to measure a candidate at all loads."""
        best = self.best or self.space.default
        point = self._best_of(best)
        rate = point.throughput if point is not None else self.axis.least
        return self.axis.climb(rate if self.axis.rates else 2.0 * self.space.parallelism(best))

    def _best_of(self, candidate: Candidate | None) -> Point | None:
        points = self.points.get(candidate.name, {}).values() if candidate is not None else ()
        return max(points, key=lambda point: worth(point, self._reference, self.goals), default=None)

    def _could_win(self, point: Point, rival: Point | None) -> bool:
        """Whether less load, which gives no more throughput, may still be better than the best point."""
        if rival is None:
            return True
        return worth(point, self._reference, self.goals).score > worth(rival, self._reference, self.goals).score
