"""The due times of requests of an open load: at constant, random (Poisson) or given intervals.

Pure. Times are in nanoseconds of the clock of the start time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Constant:
    """``rate`` requests per second at constant intervals."""

    rate: float

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end."""
        number = 0
        while True:
            # Computed from the start: a sum of intervals would accumulate rounding errors.
            yield start + int(number * 1e9 / self.rate)
            number += 1


@dataclass(frozen=True, slots=True)
class Poisson:
    """``rate`` requests per second on average, independent of each other: intervals are exponentially distributed."""

    rate: float
    seed: int = 0

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end; the same ones for the same seed."""
        random = Random(self.seed)
        moment = float(start)
        while True:
            moment += random.expovariate(self.rate) * 1e9
            yield int(moment)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Given intervals between requests (ns), repeated."""

    distances: Sequence[int]

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end."""
        moment = start
        while True:
            for distance in self.distances:
                moment += distance
                yield moment


Schedule = Constant | Poisson | Intervals


def share_of(schedule: Schedule, start: int, number: int, count: int) -> Iterator[int]:
    """Yield every ``count``-th due time, beginning with number ``number``: the share of one of ``count`` processes."""
    for index, moment in enumerate(schedule.moments(start)):
        if index % count == number:
            yield moment
