"""Distributions of durations and sizes: histograms with fixed buckets, and summaries of recent values.

``ModelStatistics`` updates them and the metrics page reads them, both on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil, nan
from time import monotonic

#: Quantiles of a summary cover at most this many seconds and this many observations. That is enough for the 0.999
#: quantile, while the seven summaries of a busy model render in about 3 ms.
SUMMARY_SECONDS = 60.0
SUMMARY_OBSERVATIONS = 4096


class Histogram:
    """Counts per bucket; ``bounds`` are the inclusive upper bounds, ascending, without infinity."""

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``times`` observations of a value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    def add(self, counts: Iterable[tuple[int, int]], sum: float) -> None:
        """Add observations counted elsewhere: pairs of bucket index and count, and the sum of the values."""
        for bucket, count in counts:
            self._counts[bucket] += count
            self.count += count
        self.sum += sum

    def cumulative(self) -> list[int]:
        """Return the number of observations up to each bound, followed by the total."""
        total = 0
        return [total := total + count for count in self._counts]


class Summary:
    """Count and sum of all observations, and exact quantiles of recent ones. ``clock`` returns seconds."""

    __slots__ = ("_clock", "_recent", "count", "sum")

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque(maxlen=SUMMARY_OBSERVATIONS)
        self.count = 0
        self.sum = 0

    def observe(self, value: int) -> None:
        """Add an observation at the current time."""
        self._recent.append((self._clock(), value))
        self.count += 1
        self.sum += value

    def quantiles(self, ranks: Sequence[float]) -> list[float]:
        """Return the value at each rank (0 to 1, nearest rank); NaN without recent observations."""
        oldest = self._clock() - SUMMARY_SECONDS
        values = sorted(value for when, value in self._recent if when >= oldest)
        if not values:
            return [nan] * len(ranks)
        return [values[max(ceil(rank * len(values)), 1) - 1] for rank in ranks]
