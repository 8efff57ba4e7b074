"""The recent past of model versions: rates and latencies of the last seconds, and samples of the last hour.

The console shows both. ``Meter`` compares the statistics of a version now with those of earlier ticks, and
``SampleHistory`` keeps a sample of each version at every tenth second. Both take the time (s) as an argument and use a
fixed amount of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import ceil, nan
from operator import sub
from typing import Final, NamedTuple

from conch.telemetry.statistics import FINE_LATENCY_BUCKETS, ModelStatistics

#: The period of latency quantiles, and that of rates (s).
LATENCY_SECONDS: Final = 60.0
RATE_SECONDS: Final = 10.0
#: Samples per series, one per ``SAMPLE_SECONDS``: an hour.
SAMPLES: Final = 360
SAMPLE_SECONDS: Final = 10.0
#: Maximum number of series groups; each takes ``SAMPLES`` numbers of 4 bytes for each field.
MOST_SERIES: Final = 256


class Recent(NamedTuple):
    """The recent activity of a version: rates per second, latencies in ms (NaN without requests).

    ``step_rate`` and ``step_failures`` are those of the requests that an ensemble has sent to the models of its steps.
    """

    rate: float = 0.0
    failures: float = 0.0
    tokens: float = 0.0
    step_rate: float = 0.0
    step_failures: float = 0.0
    p50: float = nan
    p99: float = nan


class _Mark(NamedTuple):
    """Counts at a time: requests, failures, generated tokens, requests of steps and their failures; and latencies."""

    time: float
    counts: tuple[int, int, int, int, int]
    latencies: tuple[int, ...]


class Meter:
    """Computes the recent rates and latencies of one version; call :meth:`read` at every tick.

    ``steps`` returns the numbers of ended and of failed requests of the steps of an ensemble.
    """

    def __init__(self, statistics: ModelStatistics, steps: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self.statistics = statistics
        self._steps = steps
        self._marks: deque[_Mark] = deque()

    def read(self, now: float) -> Recent:
        """Return the rates of the last ``RATE_SECONDS`` and the latencies of the last ``LATENCY_SECONDS``."""
        mark = self._mark(now)
        marks = self._marks
        marks.append(mark)
        while len(marks) > 2 and marks[1].time <= now - LATENCY_SECONDS:
            marks.popleft()
        start = next((earlier for earlier in marks if earlier.time >= now - RATE_SECONDS), mark)
        seconds = now - start.time or 1.0
        rates = [(after - before) / seconds for before, after in zip(start.counts, mark.counts, strict=True)]
        rate, failures, tokens, step_rate, step_failures = rates
        p50, p99 = _quantiles(marks[0].latencies, mark.latencies)
        return Recent(rate, failures, tokens, step_rate, step_failures, p50, p99)

    def _mark(self, now: float) -> _Mark:
        statistics, latency = self.statistics, self.statistics.fine_latency
        succeeded, failed = statistics.success_count, statistics.fail_count
        tokens = statistics.generation.generated_tokens if statistics.generation is not None else 0
        counts = (succeeded + failed, failed, tokens, *self._steps())
        if self._marks and self._marks[-1].counts == counts:
            return _Mark(now, counts, self._marks[-1].latencies)  # shared, so that an idle version takes little memory
        return _Mark(now, counts, latency.counts if latency is not None else ())


def _quantiles(before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
    """Return the median and the 0.99 quantile (ms) of the observations between two readings of a histogram."""
    cumulative = list(accumulate(map(sub, after, before)))
    if not cumulative or not cumulative[-1]:
        return nan, nan
    return _quantile(cumulative, 0.5), _quantile(cumulative, 0.99)


def _quantile(cumulative: Sequence[int], rank: float) -> float:
    """Return the geometric mean of the bounds of the bucket with this rank (nearest rank), in ms."""
    bucket = bisect_left(cumulative, max(ceil(rank * cumulative[-1]), 1))
    upper = FINE_LATENCY_BUCKETS[min(bucket, len(FINE_LATENCY_BUCKETS) - 1)]
    lower = FINE_LATENCY_BUCKETS[bucket - 1] if bucket else upper
    return float((lower * upper) ** 0.5 / 1000)


class SampleHistory:
    """Samples of several series by key, each with the same ``fields``; missing samples are NaN.

    If there are more than ``MOST_SERIES`` keys, those whose last sample is oldest are forgotten.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        self._times = array("d", [nan]) * SAMPLES
        self._series: dict[str, list[array[float]]] = {}
        self._last: dict[str, int] = {}
        self._count = 0

    def due(self, now: float) -> bool:
        """Whether the next samples are due at ``now`` (s since the epoch)."""
        return not self._count or now - self._times[(self._count - 1) % SAMPLES] >= SAMPLE_SECONDS - 0.5

    def add(self, now: float, samples: Mapping[str, Sequence[float]]) -> None:
        """Add the samples of one time, with a value for each field."""
        at = self._count % SAMPLES
        self._times[at] = now
        for key in samples:
            if key not in self._series:
                self._series[key] = [array("f", [nan]) * SAMPLES for _ in self.fields]
            self._last[key] = self._count
        for key, arrays in self._series.items():
            values = samples.get(key, ())
            for index, values_of_field in enumerate(arrays):
                values_of_field[at] = values[index] if values else nan
        self._count += 1
        self._forget()

    def series(self, key: str) -> dict[str, list[float]]:
        """Return the times (s since the epoch) and the values of each field, oldest first; empty for an unknown key."""
        arrays = self._series.get(key)
        if arrays is None:
            return {}
        start = self._count % SAMPLES if self._count > SAMPLES else 0
        order = [(start + offset) % SAMPLES for offset in range(min(self._count, SAMPLES))]
        columns = dict(zip(self.fields, arrays, strict=True))
        return {name: [values[at] for at in order] for name, values in (("time", self._times), *columns.items())}

    def _forget(self) -> None:
        oldest = sorted(self._last, key=self._last.__getitem__)
        for key in oldest:
            if len(self._series) <= MOST_SERIES and self._last[key] >= self._count - SAMPLES:
                break
            del self._series[key], self._last[key]
