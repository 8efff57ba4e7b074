"""Computes throughput, latencies, token rates and confidence intervals from the records of requests.

Pure. Records are in nanoseconds, figures in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conch.core.errors import invalid
from conch.machine.processes import Interference
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


def average_of(latency: LatencyFigures | None) -> float:
    """Return the average of a distribution; 0 if it is empty."""
    return latency.average if latency is not None else 0.0


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


# As in perf_analyzer, the throughput and the latency of three successive windows must be within a fraction of their
# mean. A window in which other processes used the machine is repeated instead of counted.


#: Number of windows that must agree.
WINDOWS: Final = 3
#: After this many windows on a disturbed machine, windows that agree suffice, with a warning.
_MOST_DISTURBED: Final = 2 * WINDOWS


class JudgedWindow(NamedTuple):
    """The figures by which a window is judged; a latency of 0 means no responses."""

    throughput: float
    latency: float
    disturbed: bool = False


@dataclass(slots=True)
class Stability:
    """Adds windows until the last ``WINDOWS`` agree within the fraction ``share``, or there are ``trials`` windows."""

    share: float = 0.1
    trials: int = 10
    _windows: list[JudgedWindow] = field(default_factory=list)

    def add(self, throughput: float, latency: float, *, disturbed: bool = False) -> None:
        """Add a window; a latency of 0 means no responses."""
        self._windows.append(JudgedWindow(throughput, latency, disturbed))

    @property
    def counted(self) -> list[int]:
        """The numbers of the windows that count: the last undisturbed ones, or the last ones if those are too few.

        Windows after the last response count only if there are no others. A window without responses between others
        counts: a server that stalls for that long, or responds that slowly, is not faster for it.
        """
        count = len(self._windows)
        numbers = range(count - self.silent or count)
        quiet = [number for number in numbers if not self._windows[number].disturbed]
        min_windows = min(WINDOWS, self.trials)
        return (quiet if len(quiet) >= min_windows else list(numbers))[-WINDOWS:]

    @property
    def disturbed(self) -> bool:
        """Whether any counted window was disturbed."""
        return any(self._windows[number].disturbed for number in self.counted)

    @property
    def stable(self) -> bool:
        """Whether the windows that count agree; windows without responses never do."""
        counted = [self._windows[number] for number in self.counted]
        return len(counted) >= WINDOWS and all(
            self._agree(values)
            for values in ([window.throughput for window in counted], [window.latency for window in counted])
        )

    @property
    def silent(self) -> int:
        """The number of windows since the last one with a response."""
        active = [number for number, window in enumerate(self._windows) if window.latency]
        return len(self._windows) - (active[-1] + 1 if active else 0)

    @property
    def over(self) -> bool:
        """Whether to stop measuring."""
        count = len(self._windows)
        return count >= self.trials or (
            self.stable and not self.silent and (not self.disturbed or count >= _MOST_DISTURBED)
        )

    def _agree(self, values: Sequence[float]) -> bool:
        mean = sum(values) / len(values)
        return mean > 0 and all(abs(value - mean) <= self.share * mean for value in values)


# Based on Student's t over repeated runs, or over the windows of one run. Windows are nearly independent of each
# other, but successive requests are not: an interval over requests would be too narrow.


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
    mean, half = fmean(values), _half_width(values)
    return Interval(max(0.0, mean - half), mean + half)


def ratio_interval(ratios: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the geometric mean of ratios and its interval; the interval is None for a single ratio."""
    logs = [log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return exp(mean), None
    half = _half_width(logs)
    return exp(mean), Interval(exp(mean - half), exp(mean + half))


def _half_width(values: Sequence[float]) -> float:
    """Return half the width of the interval of the mean."""
    return student(len(values) - 1) * stdev(values) / sqrt(len(values))


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


# Each message of a stream counts as a token if the server does not return the number of tokens.


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that a good request meets (s, None: no limit): TTFT, inter-token latency, and total latency."""

    ttft: float | None = None
    itl: float | None = None
    latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse ``ttft:200,itl:50`` (milliseconds); raises INVALID_ARG for other text."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, colon, value = part.partition(":")
            try:
                limits[name] = float(value) / 1000
            except ValueError:
                colon = ""
            if not colon or name not in ("ttft", "itl", "latency") or not limits[name] > 0:
                raise invalid(f"--slo {text}: expected ttft:MS,itl:MS,latency:MS, or some of them")
        return cls(**limits)


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """The figures of one window of a generative model.

    ``ttft`` is the time from a request's due time to its first token. ``itl`` is the inter-token latency, averaged per
    request, so that long responses do not weigh more. ``tokens`` is the rate of all tokens (per second),
    ``tokens_per_user`` the rate per request (the average over requests). ``goodput`` is the rate of requests that meet
    the objective (per second).
    """

    requests: int
    tokens: float
    tokens_per_user: float
    ttft: LatencyFigures | None
    itl: LatencyFigures | None
    goodput: float | None


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The token times of successful ``requests``: ``tokens`` of each, ``ttft`` and ``itl`` (ns).

    ``several`` marks the requests with more than one token, which ``itl`` is for.
    """

    requests: Records
    tokens: NDArray[np.int64]
    ttft: NDArray[np.int64]
    several: NDArray[np.bool_]
    itl: NDArray[np.float64]


def token_times(records: Records, events: NDArray[np.int64], spans: Sequence[Span]) -> TokenTimes:
    """Return the token times of successful requests in the windows ``spans``; ``events`` are by row of ``records``."""
    inside = np.flatnonzero(ended_in(records, spans) & (records["outcome"] == Outcome.OK) & (records["responses"] > 0))
    first, last = _of_requests(events, len(records))
    requests = records[inside]
    tokens = np.where(requests["tokens"] > 0, requests["tokens"], requests["responses"])
    # Several tokens may share a message: the rate after the first message counts. A response in a single message has no
    # inter-token latency.
    several = (tokens > 1) & (requests["responses"] > 1)
    itl = (last[inside] - first[inside])[several] / (tokens[several] - 1)
    return TokenTimes(requests, tokens, first[inside] - requests["due"], several, itl)


def generation_of(
    records: Records, events: NDArray[np.int64], spans: Sequence[Span], objective: Objective | None = None
) -> GenerationFigures:
    """Return the figures of the successful requests in the windows ``spans``; ``events`` are by row of ``records``."""
    seconds = seconds_of(spans)
    times = token_times(records, events, spans)
    requests, tokens = times.requests, times.tokens
    took = (requests["end"] - requests["due"]) / 1e9
    per_user = tokens / np.maximum(took, 1e-9)
    goodput = None
    if objective is not None:
        distances = np.zeros(len(requests))
        distances[times.several] = times.itl
        good = _keeps(times.ttft, objective.ttft) & _keeps(distances, objective.itl)
        good &= _keeps(requests["end"] - requests["due"], objective.latency)
        goodput = float(good.sum()) / seconds
    return GenerationFigures(
        len(requests), float(tokens.sum()) / seconds, float(per_user.mean()) if len(requests) else 0.0,
        LatencyFigures.of(times.ttft), LatencyFigures.of(times.itl), goodput,
    )  # fmt: skip


def _of_requests(events: NDArray[np.int64], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first and the last timestamp (ns) of each row's events."""
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.zeros(count, np.int64)
    np.minimum.at(first, events[:, 0], events[:, 1])
    np.maximum.at(last, events[:, 0], events[:, 1])
    return first, last


def _keeps(values: NDArray[Any], limit: float | None) -> NDArray[np.bool_]:
    return np.ones(len(values), bool) if limit is None else values / 1e9 <= limit
