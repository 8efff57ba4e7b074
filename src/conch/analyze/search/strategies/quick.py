"""Hill climbing: from the repository's own configuration, one step at a time to whichever neighbour is better.

Pure.  Along each dimension steps double while they help, as in a pattern search (Hooke and Jeeves, 1961).  Where no
neighbour is better, the widest gaps that nobody has looked into are tried, so that a dip is not taken for the end, and
one dimension is traded for another, as where memory bounds instances and batches together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import permutations
from typing import Final

from conch.analyze.judging.objectives import Worth
from conch.analyze.results import Point
from conch.analyze.search.space import Choice
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.stepwise import Steps
from conch.analyze.search.strategies.strategy import Trial

#: A line with at most so many values is tried in full; of a longer one, gaps narrower than this part of it stay.
_FINE: Final = 12


class HillClimb:
    """One climb over the dimensions of a space; the load follows from the candidate."""

    def __init__(self, exploration: Exploration) -> None:
        self._seen = exploration
        self._home = exploration.space.start
        self._worth = Worth(False, float("-inf"), 0.0)

    def steps(self) -> Steps:
        """Climb until neither a neighbour nor a gap is better."""
        self._worth = yield from self._seen.evaluate(self._seen.space.default)
        yield from self._move(self._home)
        while (yield from self._round()) or (yield from self._gaps()) or (yield from self._diagonals()):
            pass

    def left(self) -> float:
        """What is to be looked at around home until nothing is better; a better home has other neighbours."""
        return self._seen.unseen(self._around())

    def _around(self) -> Iterator[Choice]:
        """The places that are tried while home stays: along each dimension, and one step up and another down."""
        dimensions = self._seen.space.dimensions
        for axis, dimension in enumerate(dimensions):
            if len(dimension.values) <= _FINE or not dimension.ordered:
                yield from (_at(self._home, axis, index) for index in range(len(dimension.values)))
            else:
                yield from filter(None, (self._shifted(self._home, axis, step) for step in (-1, 1)))
        ordered = [axis for axis, one in enumerate(dimensions) if one.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            place = self._shifted(higher, down, -1) if higher is not None else None
            if place is not None:
                yield place

    def _round(self) -> Generator[Trial, Point | None, bool]:
        """Climb along each dimension in turn; whether anything was better."""
        before = self._worth
        for axis, dimension in enumerate(self._seen.space.dimensions):
            yield from self._line(axis) if dimension.ordered else self._try_all(axis)
        return self._worth > before

    def _line(self, axis: int) -> Generator[Trial, Point | None, None]:
        """Step up while that helps, twice as far each time; down where it does not."""
        for direction in (1, -1):
            step, moved = 1, False
            while (yield from self._move(self._shifted(self._home, axis, direction * step))):
                step, moved = step * 2, True
            if moved:
                # The last step may have gone too far.
                while step > 1:
                    step //= 2
                    yield from self._move(self._shifted(self._home, axis, direction * step))
                return

    def _try_all(self, axis: int) -> Generator[Trial, Point | None, None]:
        for index in range(len(self._seen.space.dimensions[axis].values)):
            yield from self._move(_at(self._home, axis, index))

    def _gaps(self) -> Generator[Trial, Point | None, bool]:
        """Try the skipped values of each dimension; whether one was better."""
        for axis, dimension in enumerate(self._seen.space.dimensions):
            while dimension.ordered and (index := self._next_gap(axis)) is not None:
                if (yield from self._move(_at(self._home, axis, index))):
                    return True
        return False

    def _next_gap(self, axis: int) -> int | None:
        """The next value to look at on the line through home: of a short line the nearest one that is not known, of a
        long one the farthest from all that are; None where the line is known."""
        count = len(self._seen.space.dimensions[axis].values)
        tried = [index for index in range(count) if self._seen.known(_at(self._home, axis, index))]
        distance = {index: min((abs(index - one) for one in tried), default=count) for index in range(count)}
        gaps = [index for index in range(count) if distance[index] > count // _FINE]
        if count <= _FINE:
            return min(gaps, key=lambda index: abs(index - self._home[axis]), default=None)
        return max(gaps, key=lambda index: distance[index], default=None)

    def _diagonals(self) -> Generator[Trial, Point | None, bool]:
        """Raise one dimension and lower another; whether that was better."""
        ordered = [axis for axis, one in enumerate(self._seen.space.dimensions) if one.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            place = self._shifted(higher, down, -1) if higher is not None else None
            if (yield from self._move(place)):
                return True
        return False

    def _move(self, place: Choice | None) -> Generator[Trial, Point | None, bool]:
        """Look at a place and go there if it is better."""
        if place is None:
            return False
        found = yield from self._seen.evaluate(self._seen.space.candidate(place))
        if found <= self._worth:
            return False
        self._home, self._worth = place, found
        return True

    def _shifted(self, place: Choice, axis: int, step: int) -> Choice | None:
        index = place[axis] + step
        return _at(place, axis, index) if 0 <= index < len(self._seen.space.dimensions[axis].values) else None


def _at(place: Choice, axis: int, index: int) -> Choice:
    choice = list(place)
    choice[axis] = index
    return tuple(choice)
