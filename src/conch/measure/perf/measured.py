"""The result of measuring one level: figures, warnings, stages of the average request, and distributions.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.machine.facts import MachineFacts
from conch.machine.processes import THROTTLED, Interference, Rival
from conch.measure.perf.figures import (
    WINDOWS,
    Confidence,
    GenerationFigures,
    WindowFigures,
    average_of,
    token_times,
)
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.senders.records import Outcome, Records, ended_in
from conch.measure.perf.server.resources import MetricFigures, ResourceFigures
from conch.measure.perf.server.statistics import SERVER_STAGES, ServerFigures

#: A sending process that computes for more than this fraction of the time limits the measurement.
BUSY: Final = 0.85
#: A result above this fraction of the senders' limit depends on the senders too: a request waits for a sender with this
#: utilization twice as long as it takes to send one (M/D/1: 0.8 / (2 x 0.2)).
NEAR_LIMIT: Final = 0.8


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The senders' machine during the measurement of a level: load averages, interference, busiest other processes.

    ``unseen`` is the reason why the server's processes could not be found (empty if they were); the interference is
    then only the time that other guests of the host took.
    """

    facts: MachineFacts
    load_before: float
    load_during: float
    interference: Interference
    rivals: tuple[Rival, ...] = ()
    unseen: str = ""

    @property
    def taken(self) -> str:
        """The interference, in words."""
        named = f" (mostly {', '.join(map(str, self.rivals))})" if self.rivals and self.interference.disturbs else ""
        return f"{self.interference}{named}"

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        taken = "" if self.unseen else f"; {self.taken}"
        return f"load {self.load_before:.1f} before and {self.load_during:.1f} during{taken}"


@dataclass(frozen=True, slots=True)
class LevelRecords:
    """All requests of the windows that count.

    ``events`` are their messages ``[messages, 2]``, with the row in ``records`` in the first column. ``spans`` are the
    starts and ends of the windows (ns, monotonic).
    """

    records: Records
    events: NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one level: ``figures`` over the windows that count, and the server's statistics for them.

    The last undisturbed windows that agree count. If none agree, or the machine was never quiet, the last windows
    count. ``generation`` is set if responses are text.

    ``stable`` is whether the windows agree, and ``disturbed`` whether other processes used the machine during them.
    ``busy`` is the fraction of the time for which the busiest sender computed. ``errors`` counts errors by message.
    ``unfinished`` requests had not completed at the end of the last window, and the oldest was due ``oldest`` seconds
    before it.

    ``runs`` are the figures of each run if there were several; ``confidence`` is then over runs, otherwise over
    windows. ``limit`` is the request rate that the senders can reach at this level (requests per second, None: not
    measured). ``gone`` is the error of the connection check after the server stopped responding (empty if it responds);
    ``stopped`` is whether the level ended early; ``missing`` counts those of a fixed number of requests that had not
    completed when the measurement gave up. ``rate`` is the request rate of the level (requests per second; 0: set by
    the callers). ``sent`` describes the requests. ``records`` is set if the plan keeps them.
    """

    level: float
    figures: WindowFigures
    generation: GenerationFigures | None
    windows: tuple[WindowFigures, ...]
    stable: bool
    server: tuple[ServerFigures, ...]
    errors: dict[str, int]
    busy: float
    unfinished: int
    oldest: float
    disturbed: bool = False
    machine: MachineFigures | None = None
    resources: ResourceFigures | None = None
    metrics: Mapping[str, MetricFigures] = field(default_factory=dict)
    runs: tuple[WindowFigures, ...] = ()
    confidence: Confidence | None = None
    limit: float | None = None
    gone: str = ""
    stopped: bool = False
    missing: int = 0
    rate: float = 0.0
    sent: str = ""
    #: Not compared: equal figures come from equal records.
    records: LevelRecords | None = field(default=None, compare=False, repr=False)

    @property
    def failed(self) -> int:
        """The number of failed requests in the windows that count."""
        return sum(self.figures.failures.values())

    @property
    def whole(self) -> bool:
        """Whether every request succeeded and the level was measured to its end."""
        wrong = self.failed or self.errors or self.gone or self.stopped or self.missing
        return bool(self.figures.requests) and not wrong

    @property
    def warnings(self) -> Iterator[str]:
        """Reasons to doubt the figures, one sentence each."""
        yield from self._of_responses()
        if self.disturbed and self.machine is not None:
            yield f"disturbed: {self.machine.taken}; {len(self._quiet())} of {len(self.windows)} windows were quiet"
        throttled = self.machine.interference.throttled if self.machine is not None else 0.0
        if throttled > THROTTLED:
            yield (
                f"the CPU quota was used up for {throttled:.0%} of the time (throttling): the figures are"
                " those of a machine with this quota"
            )
        if self.busy > BUSY:
            yield (
                f"the senders computed for {self.busy:.0%} of the time, so the server may be faster than this shows:"
                " use more processes, or another machine"
            )
        if self.limit and self._per_second > NEAR_LIMIT * self.limit:
            yield (
                f"{self._per_second:,.0f} requests per second are {self._per_second / self.limit:.0%} of the"
                f" {self.limit:,.0f} that the senders can reach at this level, so the figures depend on the senders too"
            )

    def _of_responses(self) -> Iterator[str]:
        if self.gone:
            point = f"after {self.figures.requests} responses" if self.figures.requests else "before the first response"
            yield f"the server stopped responding {point}: {self.gone}"
        elif not self.figures.requests:
            yield self._silence()
        elif self.stopped:
            count = len(self.windows)
            yield f"stopped after {count} {'window' if count == 1 else 'windows'}"
        elif self.missing:
            ended = self.figures.requests + self.failed
            yield (
                f"only {ended} of {ended + self.missing} requests completed: the others have waited for up to"
                f" {self.oldest:.1f} s and are excluded from the figures"
            )
        elif len(self.windows) < WINDOWS and not self.stable:
            yield f"only {len(self.windows)} of the {WINDOWS} windows that must agree were measured: allow more (-r)"
        elif not self.stable:
            yield f"the last {WINDOWS} windows do not agree: measure longer (-p), or allow more (-s)"
        if self._behind:
            throughput = self.figures.requests / self.figures.seconds
            yield (
                f"{throughput:.1f} of {self.rate:g} requests per second completed, and {self.unfinished} have waited "
                f"for up to {self.oldest:.1f} s: latencies grow as long as this continues"
            )
        if self.failed:
            sent = self.failed + self.figures.requests
            yield f"{self.failed} of {sent} requests failed and are excluded from the latencies"

    @property
    def _behind(self) -> bool:
        """Whether fewer requests completed than were due, by more than the variation of random arrivals."""
        due, ended = self.rate * self.figures.seconds, self.figures.requests + self.failed
        return bool(self.figures.requests) and due - ended > max(0.05 * due, 4 * due**0.5)

    def _silence(self) -> str:
        seconds = sum(window.seconds for window in self.windows)
        if self.failed:
            return f"no request succeeded in {seconds:.1f} s"
        return (
            f"no request completed in {seconds:.1f} s, and {self.unfinished} have waited for up to {self.oldest:.1f} s:"
            " the server hangs, or windows are too short for its responses (-p)"
        )

    def _quiet(self) -> list[WindowFigures]:
        return [window for window in self.windows if not (window.interference and window.interference.disturbs)]

    @property
    def _per_second(self) -> float:
        return (self.figures.requests + self.failed) / self.figures.seconds if self.figures.seconds else 0.0


def server_of(plan: PerfPlan, measured: Measured) -> ServerFigures | None:
    """Return the statistics of the measured model; others may have run as ensemble steps."""
    return next((version for version in measured.server if version.model == plan.model), None)


def stages_of(plan: PerfPlan, measured: Measured) -> Mapping[str, float]:
    """Return the seconds of each stage: ``send``, ``network``, the server's stages, ``receive``.

    ``network`` is the client's wait beyond the server's stages. If parts of a stream arrive while the server computes,
    they are included in the server's stages, and ``receive`` is left out. Without server statistics, ``wait`` replaces
    the stages between ``send`` and ``receive``.
    """
    figures, server = measured.figures, server_of(plan, measured)
    counted = server.stages if server is not None else {}
    send, wait, receive = (average_of(stage) for stage in (figures.send, figures.wait, figures.receive))
    if not counted:
        return {"send": send, "wait": wait, "receive": receive}
    stages = {name: counted[name].average if name in counted else 0.0 for name in SERVER_STAGES}
    spent = sum(stages.values())
    if spent > wait:
        return {"send": send, "network": max(0.0, wait + receive - spent), **stages}
    return {"send": send, "network": wait - spent, **stages, "receive": receive}


#: Number of quantiles of a distribution, spaced logarithmically towards its tail.
_QUANTILES: Final = 80

Quantiles = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LevelDistributions:
    """Quantiles as pairs of a fraction (0 to below 1) and the time (s) that this fraction of requests did not exceed.

    ``ttft`` and ``itl`` are empty unless responses are text; all are empty if the requests are unknown.
    """

    latency: Quantiles = ()
    ttft: Quantiles = ()
    itl: Quantiles = ()

    @classmethod
    def of(cls, level: LevelRecords | None, *, text: bool) -> LevelDistributions:
        """Return the distributions of the successful requests in the windows that count."""
        if level is None:
            return cls()
        records = level.records[ended_in(level.records, level.spans)]
        well = records[records["outcome"] == Outcome.OK]
        latency = quantiles(well["end"] - well["due"])
        if not text:
            return cls(latency)
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
