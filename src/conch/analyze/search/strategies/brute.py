"""The full sweep: every candidate of the space, the default first, each at all its loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conch.analyze.results import Candidate, Point
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.loads import LoadClimb
from conch.analyze.search.strategies.stepwise import Steps


class FullSweep:
    """Measures all; ``climb`` makes the loads of one candidate."""

    def __init__(self, exploration: Exploration, climb: Callable[[], LoadClimb]) -> None:
        self._seen, self._climb = exploration, climb
        self._swept = 0

    def steps(self) -> Steps:
        """Measure one candidate after the other, each at all its loads."""
        best: dict[float, Point] = {}
        for candidate in candidates(self._seen):
            loads = self._climb()
            while (load := loads.next()) is not None:
                point = yield from self._seen.measure(candidate, load, rival=best.get(load))
                if point is None:
                    break
                kept = self._seen.keeps(point)
                loads.add(load, point.throughput, kept)
                if kept and (load not in best or point.throughput > best[load].throughput):
                    best[load] = point
            self._swept += 1

    def left(self) -> float:
        """For each candidate left as many measurements as the others took on average."""
        each = self._seen.count / self._swept if self._swept else self._seen.climb()
        return each * max(0, self._seen.space.distinct - self._swept)


def candidates(exploration: Exploration) -> Iterator[Candidate]:
    """All candidates of the space once, the default first."""
    space = exploration.space
    seen = {space.default.name}
    yield space.default
    for choice in space.choices():
        candidate = space.candidate(choice)
        if candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate
