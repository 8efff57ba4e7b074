"""The state of a search: the points of each candidate, the best one, and the loads to measure.

Pure. Its generators are parts of those that :class:`conch.measure.analyze.search.strategies.Strategy` drives.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from math import inf, log
from typing import Any, Final

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.objectives import (
    Worth,
    pooled,
    satisfied,
    score,
    undecided,
    valid,
    violations,
    worth,
)
from conch.measure.analyze.results import Candidate, CandidateResult, Point, Trial
from conch.measure.analyze.search.axis import FLAT, GROWTH, WAITING, LoadAxis
from conch.measure.analyze.search.space import Choice, SearchSpace, merged

#: Maximum number of measurements of a point that misses a bound only by noise.
_ATTEMPTS: Final = 3
#: Maximum number of rates per candidate, and the ratio of two rates that is not worth a measurement.
_RATES: Final = 16
_FINER: Final = 1.03

#: The best point that satisfies the constraints, and the point at the lowest higher load that breaks a latency bound.
_Found = tuple[Point | None, Point | None]


class Exploration:
    """The points measured so far."""

    def __init__(self, space: SearchSpace, goals: Goals, axis: LoadAxis, steps: int) -> None:
        """Start without points; ``steps`` limits the bisection between loads that keep the bounds and break them."""
        self.space = space
        self.goals = goals
        self.axis = axis
        self.best: Candidate | None = None
        self.candidates: dict[str, Candidate] = {}
        #: Points by candidate and load; repeated measurements are pooled.
        self.points: dict[str, dict[float, Point]] = {}
        self._steps = steps
        self._repeated: dict[tuple[str, float], list[Point]] = {}
        self._evaluated: set[str] = set()
        self._failed: set[str] = set()
        #: The configurations of each candidate, as far as they are known without a server.
        self._configs: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        self._reference: Point | None = None

    @property
    def count(self) -> int:
        """The number of measurements so far."""
        return sum(map(len, self._repeated.values()))

    @property
    def results(self) -> list[CandidateResult]:
        """The candidates tried so far, with their points in order of load."""
        return [
            CandidateResult(candidate, tuple(point for _, point in sorted(self.points[name].items())), "", configs)
            for (name, candidate), configs in zip(self.candidates.items(), self._configs.values(), strict=True)
        ]

    def measure(
        self, candidate: Candidate, load: float, *, rival: Point | None = None
    ) -> Generator[Trial, Point | None, Point | None]:
        """Measure a candidate at a load; return None if that fails.

        A point that misses a bound only by noise, and could win, is measured again; the mean then decides.
        """
        if candidate.name not in self.candidates:
            self.candidates[candidate.name], self.points[candidate.name] = candidate, {}
            self._configs[candidate.name] = _configs(self.space, candidate)
        known = self.points[candidate.name]
        if load in known or candidate.name in self._failed:
            return known.get(load)
        return (yield from self._measure(candidate, load, rival))

    def _measure(
        self, candidate: Candidate, load: float, rival: Point | None
    ) -> Generator[Trial, Point | None, Point | None]:
        known = self.points[candidate.name]
        for _ in range(_ATTEMPTS):
            point = yield Trial(candidate, load, rival)
            if point is None:
                self._failed.add(candidate.name)
                return known.get(load)
            self._note(candidate, load, point)
            if not (undecided(known[load], self.goals) and self._could_win(known[load], rival)):
                break
        return known[load]

    def _note(self, candidate: Candidate, load: float, point: Point) -> None:
        repeated = self._repeated.setdefault((candidate.name, load), [])
        repeated.append(point)
        self.points[candidate.name][load] = pooled(repeated)
        if self._reference is None and valid(point):
            self._reference = point
        if self.best is None or self.worth(candidate) > self.worth(self.best):
            self.best = candidate

    def evaluate(self, candidate: Candidate) -> Generator[Trial, Point | None, Worth]:
        """Search the best load of a candidate, and return the worth of its best point.

        The first candidate, the default, starts at the lowest load; the others start at the best load so far.
        """
        if candidate.name not in self._evaluated:
            self._evaluated.add(candidate.name)
            yield from self._rates(candidate) if self.axis.rates and not self.axis.loads else self._loads(candidate)
        return self.worth(candidate)

    def confirm(self, candidate: Candidate, load: float) -> Generator[Trial, Point | None, None]:
        """Measure a point again, and a lower load if it then breaks a latency bound.

        The best of many points is partly luck.
        """
        point = yield from self._measure(candidate, load, None)
        lower = self.axis.corrected(load, point, self.goals) if point is not None else None
        if lower is not None:
            yield from self.measure(candidate, lower)

    def look_higher(self, candidate: Candidate) -> Generator[Trial, Point | None, None]:
        """Measure the loads above a candidate's best again, while they are better.

        Other processes may have disturbed the first measurement undetected.
        """
        best = self._best_of(candidate)
        load = self.axis.more(best.load) if best is not None and (self.axis.loads or not self.axis.rates) else None
        stale = 0
        while load is not None and stale < FLAT:
            self._repeated.pop((candidate.name, load), None)
            point = yield from self._measure(candidate, load, best)
            if point is None:
                return
            better = self.keeps(point) and best is not None and self._score(point) > self._score(best)
            stale, best = (0, point) if better else (stale + 1, best)
            load = self.axis.more(load)

    def keeps(self, point: Point) -> bool:
        """Return whether a point is valid and satisfies the constraints."""
        return satisfied(point, self.goals)

    def _loads(self, candidate: Candidate) -> Generator[Trial, Point | None, None]:
        """Find the best load of a candidate.

        Raises the load while that is better, otherwise lowers it, and then bisects between the best load and one that
        breaks a latency bound.
        """
        rival = self.best_point()
        start = rival.load if rival is not None else min(self.axis.loads, default=self.axis.minimum)
        best, broken = yield from self._rise(candidate, start, rival)
        if best is None or self._load_matters:
            best, broken = yield from self._fall(candidate, best, broken, rival)
        for _ in range(self._steps):
            if best is None or broken is None or not self._gains(broken, best) or not self._could_win(broken, rival):
                return
            load = self.axis.between(best.load, broken.load)
            point = (yield from self.measure(candidate, load, rival=self.best_point())) if load is not None else None
            if point is None:
                return
            best, broken = (point, broken) if self.keeps(point) else (best, point)

    def _rise(
        self, candidate: Candidate, load: float | None, rival: Point | None
    ) -> Generator[Trial, Point | None, _Found]:
        """Raise the load from ``load`` until neither a higher load nor the one that keeps the candidate busy is better.

        With a rival, the climb ends at the load that keeps the candidate busy.
        """
        best: Point | None = None
        highest: Point | None = None
        broken: Point | None = None
        stale, busy = 0, self.axis.fitting(self.space.parallelism(candidate))
        flat = FLAT if rival is None else 1
        while load is not None:
            point = yield from self.measure(candidate, load, rival=self.best_point())
            if point is None:
                break
            too_much = self._too_much(point)
            better = not too_much and (highest is None or self._gains(point, highest))
            stale, highest = (0, point) if better else (stale + 1, highest)
            # Latency may be longer with two callers than with four, which are computed together.
            broken = (broken or point) if too_much else None
            if self.keeps(point) and (best is None or self._score(point) > self._score(best)):
                best = point
            if rival is not None and (too_much or load >= busy):
                break
            # A candidate that pads its batches is no faster before they are full.
            load = self.axis.more(load) if stale < flat else busy if load < busy and not too_much else None
        return best, broken

    def _fall(
        self, candidate: Candidate, best: Point | None, broken: Point | None, rival: Point | None
    ) -> Generator[Trial, Point | None, _Found]:
        """Lower the load from the lowest one so far until the latency bounds are kept.

        If latency is an objective, continue while that is better.
        """
        point: Point | None = min(
            self.points[candidate.name].values(), key=lambda measured: measured.load, default=None
        )
        while point is not None:
            if self._too_much(point):
                broken = point
                load = self.axis.corrected(point.load, point, self.goals) if self._could_win(point, rival) else None
            else:
                load = self.axis.less(point.load) if self._load_matters and point is best else None
            point = (yield from self.measure(candidate, load, rival=self.best_point())) if load is not None else None
            if point is not None and self.keeps(point) and (best is None or self._score(point) > self._score(best)):
                best = point
        return best, broken

    @property
    def _load_matters(self) -> bool:
        """Whether an objective may be better at a load that leaves some instances idle."""
        objectives = [objective for model_goals in self.goals.models.values() for objective in model_goals.objectives]
        return any(objective.metric.startswith(WAITING) for objective in objectives)

    def _too_much(self, point: Point) -> bool:
        """Return whether a point breaks a bound that any higher load breaks too, such as latency or memory."""
        return any(
            violation.constraint.maximum is not None and violation.constraint.metric != "cost"
            for violation in violations(point, self.goals)
        )

    def _score(self, point: Point) -> float:
        return score(point, self._reference, self.goals) if self._reference is not None else 0.0

    def _gains(self, point: Point, over: Point) -> bool:
        """Return whether a point's score is higher by more than noise, regardless of the constraints."""
        return self._score(point) > self._score(over) * (1 + GROWTH)

    def _rates(self, candidate: Candidate) -> Generator[Trial, Point | None, None]:
        """Find the highest rate that a candidate sustains.

        Starts slightly above the rival's rate, which rejects a worse candidate at once. Doubles the rate until the
        server cannot follow or breaks a bound, and then bisects.
        """
        rival = self.best_point()
        rate = self.axis.bounded(rival.load * _FINER if rival is not None else self.axis.minimum)
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
            next_rate = (kept + broken) / 2 if kept and broken < inf else 2 * kept if kept else rate / 2
            rate = self.axis.bounded(next_rate)
            if rate in self.points[candidate.name]:
                return

    def best_point(self) -> Point | None:
        """Return the best point of the best candidate, if it satisfies the constraints."""
        point = self._best_of(self.best) if self.best is not None else None
        return point if point is not None and satisfied(point, self.goals) else None

    def worth(self, candidate: Candidate) -> Worth:
        """Return the worth of a candidate's best point."""
        point = self._best_of(candidate)
        return worth(point, self._reference, self.goals)

    @property
    def best_height(self) -> float:
        """The height of the best candidate; negative infinity if there is none."""
        return self.height(self.best) if self.best is not None else -inf

    def height(self, candidate: Candidate) -> float:
        """Return the worth of a candidate as one number: by score if it satisfies the constraints, else below 0."""
        judged = self.worth(candidate)
        return log(judged.score) + 100 if judged.satisfied and judged.score > 0 else -min(judged.excess, 1e6)

    def known(self, choice: Choice) -> bool:
        """Return whether the candidate of a choice was tried."""
        return self.space.named(choice) in self.candidates

    def unseen(self, choices: Iterable[Choice]) -> float:
        """Estimate the number of measurements for the choices that have not been tried."""
        new = {self.space.key_of(choice) for choice in choices if not self.known(choice)}
        first = next(iter(self.points), "")
        others = sum(len(taken) for (name, _), taken in self._repeated.items() if name != first)
        return len(new) * max(1.0, others / max(1, len(self.points) - 1))

    def climb(self) -> float:
        """Estimate the number of measurements of a candidate at all loads."""
        best = self.best or self.space.default
        point = self._best_of(best)
        rate = point.throughput if point is not None else self.axis.minimum
        return self.axis.climb(rate if self.axis.rates else 2.0 * self.space.parallelism(best))

    def _best_of(self, candidate: Candidate | None) -> Point | None:
        points = self.points.get(candidate.name, {}).values() if candidate is not None else ()
        return max(points, key=lambda point: worth(point, self._reference, self.goals), default=None)

    def _could_win(self, point: Point, rival: Point | None) -> bool:
        """Return whether a lower load, whose throughput is no higher, may still beat the best point."""
        return rival is None or self._score(point) > self._score(rival)


def _configs(space: SearchSpace, candidate: Candidate) -> Mapping[str, Mapping[str, Any]]:
    return {model: merged(config, candidate.overrides.get(model, {})) for model, config in space.configs.items()}
