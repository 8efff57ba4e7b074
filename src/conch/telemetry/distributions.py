"""Distributions of durations and sizes: a histogram with fixed buckets, and a summary of the recent past.

Updated by ``ModelStatistics`` and read by the metrics page, both on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil, nan
from time import monotonic

#: A summary's quantiles cover this many seconds, but at most this many observations: enough for the 0.999 quantile,
#: while the seven summaries of a busy model still render in about 3 ms.
SUMMARY_SECONDS = 60.0
SUMMARY_OBSERVATIONS = 4096


class Histogram:
    """Counts per bucket; ``bounds`` are the buckets' inclusive upper limits, ascending, without infinity."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``times`` observations of a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def add(self, counts: Iterable[tuple[int, int]], sum: float) -> None:
        """Add observations that somebody else has counted: how many for each bucket, by number, and their sum."""
        for bucket, count in counts:
            self._counts[bucket] += count
            self.count += count
        self.sum += sum

    def cumulative(self) -> list[int]:
        """The number of observations up to each bound, and then that of all."""
        total = 0
        return [total := total + count for count in self._counts]


class Summary:
    """Count and sum of all observations, and the exact quantiles of the recent ones.  ``clock`` returns seconds."""

    __slots__ = ("_clock", "_recent", "count", "sum")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=SUMMARY_OBSERVATIONS)
        self.count = 0
        self.sum = 0

    def observe(self, value: int) -> None:
        """Count an observation, now."""
        self._recent.append((self._clock(), value))
        self.count += 1
        self.sum += value

    def quantiles(self, ranks: Sequence[float]) -> list[float]:
        """The value at each rank (0 to 1, nearest rank); NaN if there are no recent observations."""
        oldest = self._clock() - SUMMARY_SECONDS
        values = sorted(value for when, value in self._recent if when >= oldest)
        if not values:
            return [nan] * len(ranks)
        return [values[max(ceil(rank * len(values)), 1) - 1] for rank in ranks]
