"""The full sweep: every candidate of the space, the default first, each at all its loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conch.analyze.objectives import satisfied
from conch.analyze.results import Candidate, Point
from conch.analyze.strategies.exploration import Exploration
from conch.analyze.strategies.loads import LoadClimb
from conch.analyze.strategies.stepwise import Steps


def brute(exploration: Exploration, climb: Callable[[], LoadClimb]) -> Steps:
    """Measure all; ``climb`` makes the loads of one candidate."""
    best: dict[float, Point] = {}
    for candidate in candidates(exploration):
        yield from climbed(exploration, candidate, climb(), best)


def climbed(exploration: Exploration, candidate: Candidate, loads: LoadClimb, best: dict[float, Point]) -> Steps:
    """Measure one candidate at all its loads.  ``best`` has the best point at each load, which this adds to."""
    while (load := loads.next()) is not None:
        point = yield from exploration.measure(candidate, load, rival=best.get(load))
        if point is None:
            return
        kept = satisfied(point, exploration.goals)
        loads.add(load, point.throughput, kept)
        if kept and (load not in best or point.throughput > best[load].throughput):
            best[load] = point


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
