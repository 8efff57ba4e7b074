"""When requests of an open load are due: at even distances, at random (Poisson), or at given ones.

Pure: moments are nanoseconds of whatever clock the start is of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Constant:
    """``rate`` requests a second, at even distances."""

    rate: float

    def moments(self, start: int) -> Iterator[int]:
        """The moments from ``start`` on, without end."""
        number = 0
        while True:
            # Not by adding distances, whose rounding would add up.
            yield start + int(number * 1e9 / self.rate)
            number += 1


@dataclass(frozen=True, slots=True)
class Poisson:
    """``rate`` requests a second on average, each independent of the others: distances are exponential."""

    rate: float
    seed: int = 0

    def moments(self, start: int) -> Iterator[int]:
        """The moments from ``start`` on, without end; the same for the same seed."""
        random = Random(self.seed)
        moment = float(start)
        while True:
            moment += random.expovariate(self.rate) * 1e9
            yield int(moment)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Given distances between requests (ns), again and again."""

    distances: Sequence[int]

    def moments(self, start: int) -> Iterator[int]:
        """The moments from ``start`` on, without end."""
        moment = start
        while True:
            for distance in self.distances:
                moment += distance
                yield moment


Schedule = Constant | Poisson | Intervals


def share_of(schedule: Schedule, start: int, number: int, count: int) -> Iterator[int]:
    """Every ``count``-th moment, from the one with ``number`` on: what one of ``count`` processes starts."""
    for place, moment in enumerate(schedule.moments(start)):
        if place % count == number:
            yield moment
