"""Computes figures from the records of a load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.generation.answer import Record

Records = Sequence[Record]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; ``more`` is true if a higher value is better."""

    name: str
    of: Callable[[Records], float]
    more: bool = False
    digits: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a fraction ``share`` of all values does not exceed, with linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def throughput(records: Records) -> float:
    """Return tokens per second, from the first request to the last response."""
    begin, end = min(record.due for record in records), max(record.end for record in records)
    return sum(record.tokens for record in records) / (end - begin) * 1e9


def latencies(records: Records) -> list[float]:
    """Return the seconds from each request's due time to the end of its response."""
    return [(record.end - record.due) / 1e9 for record in records]


def first_tokens(records: Records) -> list[float]:
    """Return the milliseconds from each request's due time to its first text."""
    return [(record.times[0] - record.due) / 1e6 for record in records]


def gaps(records: Records) -> list[float]:
    """Return the milliseconds between consecutive texts of a response, for the closed loop only."""
    return [
        (after - before) / 1e6 for record in records if not record.arrival for before, after in pairwise(record.times)
    ]


THROUGHPUT = Figure("tokens/s", throughput, more=True)
LATENCY = (
    Figure("latency, median (s)", lambda records: percentile(latencies(records), 0.5), digits=2),
    Figure("latency, p95 (s)", lambda records: percentile(latencies(records), 0.95), digits=2),
)
FIRST = (
    Figure("time to first token, median (ms)", lambda records: percentile(first_tokens(records), 0.5)),
    Figure("time to first token, p95 (ms)", lambda records: percentile(first_tokens(records), 0.95)),
)
GAPS = (
    Figure("between texts, median (ms)", lambda records: percentile(gaps(records), 0.5), digits=1),
    Figure("between texts, p99 (ms)", lambda records: percentile(gaps(records), 0.99), digits=1),
    Figure(
        "p99 over median", lambda records: percentile(gaps(records), 0.99) / percentile(gaps(records), 0.5), digits=1
    ),
)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the smallest and the largest of the ratios within each round."""
    ratios = [our / other for our, other in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)
