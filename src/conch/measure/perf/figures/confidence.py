"""95 % confidence intervals of figures.

Pure. Based on Student's t over repeated runs, or over the windows of one run. Windows are nearly independent of each
other, but successive requests are not: an interval over requests would be too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Final, Literal

from conch.measure.perf.figures.latency import WindowFigures

#: The 0.975 quantile of Student's t by degrees of freedom, from 1 on. Source: any statistics table.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """The range from ``low`` to ``high``."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Confidence:
    """The intervals of throughput, average latency and its percentiles (s), over ``count`` runs or windows."""

    over: Literal["runs", "windows"]
    count: int
    throughput: Interval
    average: Interval | None = None
    percentiles: Mapping[float, Interval] = field(default_factory=dict)


def student(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t; beyond the table its last value, which is slightly conservative."""
    return _T[min(degrees, len(_T)) - 1]


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of nonnegative values; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student(len(values) - 1) * deviation / sqrt(len(values))
    return Interval(max(0.0, mean - half), mean + half)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the geometric mean of ratios and its interval; the interval is None for a single ratio."""
    logs = [log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return exp(mean), None
    deviation = sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = student(len(logs) - 1) * deviation / sqrt(len(logs))
    return exp(mean), Interval(exp(mean - half), exp(mean + half))


def confidence_of(parts: Sequence[WindowFigures], over: Literal["runs", "windows"]) -> Confidence | None:
    """Return the intervals over runs or windows; None if fewer than two have responses."""
    latencies = [part.latency for part in parts if part.latency is not None]
    throughput = mean_interval([part.throughput for part in parts])
    if throughput is None or len(latencies) < 2:
        return None
    percentiles = {}
    for number in latencies[0].percentiles:
        interval = mean_interval([latency.percentiles[number] for latency in latencies])
        if interval is not None:
            percentiles[number] = interval
    average = mean_interval([latency.average for latency in latencies])
    return Confidence(over, len(parts), throughput, average, percentiles)
