"""After a search that compared candidates at few loads: the best ones at all loads, for their curves."""

from __future__ import annotations

from collections.abc import Callable

from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.loads import LoadClimb
from conch.analyze.search.strategies.stepwise import Steps


class TopSweep:
    """A search, and then the loads of the best ``top`` candidates and of the default."""

    def __init__(
        self,
        exploration: Exploration,
        search: Steps,
        left: Callable[[], float],
        climb: Callable[[], LoadClimb],
        top: int,
    ) -> None:
        """``left`` estimates the measurements of the search; ``climb`` makes the loads of one candidate."""
        self._seen, self._search, self._left_of_search, self._climb, self._top = exploration, search, left, climb, top
        self._climbs_left = top + 1

    def steps(self) -> Steps:
        """Search, then sweep."""
        yield from self._search
        self._left_of_search = lambda: 0
        best = sorted(self._seen.candidates.values(), key=self._seen.worth, reverse=True)[: self._top]
        default = self._seen.space.default
        chosen = [*best, *([] if default in best else [default])]
        for index, candidate in enumerate(chosen):
            self._climbs_left = len(chosen) - index
            loads = self._climb()
            while (load := loads.next()) is not None:
                point = yield from self._seen.measure(candidate, load)
                if point is None:
                    break
                loads.add(load, point.throughput, self._seen.keeps(point))
        self._climbs_left = 0

    def left(self) -> float:
        """The rest of the search, and the loads of each candidate that is swept."""
        return self._left_of_search() + self._seen.climb() * self._climbs_left
