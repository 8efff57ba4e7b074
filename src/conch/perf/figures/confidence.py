"""How far a figure may be from what more measuring would show: intervals that hold with 95 % confidence.

Pure.  Student's t over repeated runs, or over the windows of one run.  Windows are nearly independent of each other,
where requests that follow each other are not: an interval over requests would be too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Final, Literal

from conch.perf.figures.latency import WindowFigures

#: The quantile 0.975 of Student's t by degrees of freedom, from 1 on; source: any table.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high``."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Confidence:
    """Intervals of the throughput, the average latency and its percentiles (s), over ``count`` runs or windows."""

    over: Literal["runs", "windows"]
    count: int
    throughput: Interval
    average: Interval | None = None
    percentiles: Mapping[float, Interval] = field(default_factory=dict)


def student(degrees: int) -> float:
    """The quantile 0.975 of Student's t; beyond the table the next larger one, which is a little too careful."""
    return _T[min(degrees, len(_T)) - 1]


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Where the mean of what ``values`` were drawn from lies; None for fewer than two.  None of them is below 0."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = student(len(values) - 1) * deviation / sqrt(len(values))
    return Interval(max(0.0, mean - half), mean + half)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, Interval | None]:
    """The geometric mean of ratios, and where that of what they were drawn from lies."""
    logs = [log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return exp(mean), None
    deviation = sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    half = student(len(logs) - 1) * deviation / sqrt(len(logs))
    return exp(mean), Interval(exp(mean - half), exp(mean + half))


def confidence_of(parts: Sequence[WindowFigures], over: Literal["runs", "windows"]) -> Confidence | None:
    """The intervals over runs or windows; None for fewer than two with answers."""
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
