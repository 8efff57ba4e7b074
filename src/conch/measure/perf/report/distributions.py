"""Distributions of times for charts: quantiles of each level, so that its requests need not be kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.measure.perf.figures import token_times
from conch.measure.perf.measured import LevelRecords
from conch.measure.perf.senders.records import Outcome, ended_in

#: Number of quantiles of a distribution, spaced logarithmically towards its tail.
_QUANTILES: Final = 80

Quantiles = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LevelDistributions:
    """Quantiles as pairs of a fraction (0 to below 1) and the time (s) that this fraction of requests did not exceed.

    ``ttft`` and ``itl`` are empty unless responses are text.
    """

    latency: Quantiles
    ttft: Quantiles
    itl: Quantiles

    @classmethod
    def of(cls, level: LevelRecords, *, text: bool) -> LevelDistributions:
        """Return the distributions of the successful requests in the windows that count."""
        records = level.records[ended_in(level.records, level.spans)]
        well = records[records["outcome"] == Outcome.OK]
        latency = quantiles(well["end"] - well["due"])
        if not text:
            return cls(latency, (), ())
        times = token_times(level.records, level.events, level.spans)
        return cls(latency, quantiles(times.ttft), quantiles(times.itl))


def quantiles(durations: NDArray[Any]) -> Quantiles:
    """Return the quantiles of durations (ns); the largest is at the fraction of all others."""
    count = len(durations)
    if not count:
        return ()
    shares = 1 - np.logspace(0, -log10(count), min(_QUANTILES, count)) if count > 1 else np.zeros(1)
    values = np.percentile(durations / 1e9, 100 * shares, method="inverted_cdf")
    return [(float(share), float(value)) for share, value in zip(shares, values, strict=True)]
