"""From records to figures: throughput and latencies.

Pure; times are nanoseconds on the way in and seconds on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.machine.interference import Interference
from conch.perf.senders.records import Outcome, Records, Span, ended_in, seconds_of

PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """How long something took (s); ``percentiles`` by number (50 is the median)."""

    average: float
    deviation: float
    percentiles: Mapping[float, float]
    longest: float

    @classmethod
    def of(cls, durations: NDArray[Any], percentiles: Sequence[float] = PERCENTILES) -> LatencyFigures | None:
        """The latency over durations (ns); None without any."""
        if not len(durations):
            return None
        seconds = durations / 1e9
        values = np.percentile(seconds, percentiles, method="inverted_cdf")
        found = {percentile: float(value) for percentile, value in zip(percentiles, values, strict=True)}
        return cls(float(seconds.mean()), float(seconds.std()), found, float(seconds.max()))


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """What one window measured: requests that ended well in it, and those that did not, by outcome.

    ``throughput`` counts inferences a second.  ``latency`` is from when a request was due to the last byte of its
    answer, ``send`` to its own last byte, ``wait`` from there to the first byte of the answer, ``receive`` to the last;
    ``late`` is how much later than due requests were sent.  ``interference`` is what others took of the machine
    meanwhile (None: nobody looked).
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
        """The latency that counts (s): at ``percentile``, or on average where that is 0; None without answers."""
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
    """The figures of the windows ``spans`` together; ``inferences`` counts those of payloads."""
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
