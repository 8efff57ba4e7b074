"""The full sweep: every candidate of the space, the default first, each at all its loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conch.analyze.goals import Goals
from conch.analyze.objectives import satisfied
from conch.analyze.results import Candidate, Point
from conch.analyze.space import SearchSpace
from conch.analyze.strategies.loads import LoadClimb
from conch.analyze.strategies.strategy import Trial


class Brute:
    """Measures all; pure, see :class:`conch.analyze.strategies.strategy.Strategy`."""

    def __init__(self, space: SearchSpace, goals: Goals, loads: Callable[[], LoadClimb]) -> None:
        """``loads`` makes the climb of one candidate."""
        self._goals = goals
        self._loads = loads
        self._candidates = _candidates(space)
        self._left = space.size
        self._measured = 0
        self._finished = 0
        self._candidate: Candidate | None = None
        self._climb = loads()
        self._best: dict[float, Point] = {}

    def next(self) -> Trial | None:
        """The next load of this candidate, or the first of the next one."""
        while True:
            load = self._climb.next() if self._candidate is not None else None
            if self._candidate is not None and load is not None:
                return Trial(self._candidate, load, self._best.get(load))
            self._finish()
            self._candidate = next(self._candidates, None)
            if self._candidate is None:
                return None

    def add(self, trial: Trial, point: Point) -> None:
        """Learn what the trial measured."""
        self._measured += 1
        kept = satisfied(point, self._goals)
        self._climb.add(trial.load, point.throughput, kept)
        best = self._best.get(trial.load)
        if kept and (best is None or point.throughput > best.throughput):
            self._best[trial.load] = point

    def fail(self, trial: Trial) -> None:
        """Leave the candidate out."""
        self._finish()

    @property
    def expected(self) -> int:
        """The measurements so far, and for each candidate left as many as the others took on average."""
        each = self._measured / self._finished if self._finished else 8
        return round(max(self._measured + 1, self._measured + each * (self._left - self._finished)))

    def _finish(self) -> None:
        if self._candidate is not None:
            self._finished += 1
        self._candidate = None
        self._climb = self._loads()


def _candidates(space: SearchSpace) -> Iterator[Candidate]:
    seen = {space.default.name}
    yield space.default
    for choice in space.choices():
        candidate = space.candidate(choice)
        if candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate
