"""Computes throughput and latencies from the records of requests.

Pure. Records are in nanoseconds, figures in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.machine.interference import Interference
from conch.measure.perf.senders.records import Outcome, Records, Span, ended_in, seconds_of

PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """The distribution of a duration (s); ``percentiles`` by number (50 is the median)."""

    average: float
    deviation: float
    percentiles: Mapping[float, float]
    longest: float

    @classmethod
    def of(cls, durations: NDArray[Any], percentiles: Sequence[float] = PERCENTILES) -> LatencyFigures | None:
        """Return the distribution of durations (ns); None if there are none."""
        if not len(durations):
            return None
        seconds = durations / 1e9
        values = np.percentile(seconds, percentiles, method="inverted_cdf")
        by_percentile = {percentile: float(value) for percentile, value in zip(percentiles, values, strict=True)}
        return cls(float(seconds.mean()), float(seconds.std()), by_percentile, float(seconds.max()))


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """The figures of one window: the successful requests, and the number of failed ones by outcome.

    ``throughput`` is in inferences per second. ``latency`` is from a request's due time to the last byte of its
    response; ``send`` from the request's first to its last byte, ``wait`` from there to the first byte of the response,
    and ``receive`` to its last byte. ``late`` is the delay between the due time and the first byte of the request.
    ``interference`` is None if it was not measured.
    """

    seconds: float
    requests: int
    throughput: float
    failures: Mapping[Outcome, int]
    latency: LatencyFigures | None
    send: LatencyFigures | None
    wait: LatencyFigures | None
    receive: LatencyFigures | None
    late: LatencyFigures | None
    interference: Interference | None = None

    def judged(self, percentile: float = 0.0) -> float | None:
        """Return the latency that must be stable (s): a percentile, or the average for 0; None without responses."""
        if self.latency is None:
            return None
        return self.latency.percentiles[percentile] if percentile else self.latency.average


def figures_of(
    records: Records,
    spans: Sequence[Span],
    inferences: NDArray[Any],
    percentiles: Sequence[float] = PERCENTILES,
    interference: Interference | None = None,
) -> WindowFigures:
    """Return the figures over all windows ``spans``; ``inferences`` is the number of inferences of each payload."""
    inside, good = ended_in(records, spans), records["outcome"] == Outcome.OK
    well = records[inside & good]
    outcomes, counts = np.unique(records["outcome"][inside & ~good], return_counts=True)
    seconds = seconds_of(spans)
    written = np.where(well["written"] > 0, well["written"], well["sent"])
    return WindowFigures(
        seconds,
        len(well),
        float(inferences[well["payload"]].sum()) / seconds if len(well) else 0.0,
        {Outcome(int(outcome)): int(count) for outcome, count in zip(outcomes, counts, strict=True)},
        LatencyFigures.of(well["end"] - well["due"], percentiles),
        LatencyFigures.of(written - well["sent"], percentiles),
        LatencyFigures.of(np.maximum(0, well["first"] - written), percentiles),
        LatencyFigures.of(well["end"] - well["first"], percentiles),
        LatencyFigures.of(well["sent"] - well["due"], percentiles),
        interference,
    )
