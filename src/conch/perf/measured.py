"""What the measurement of one level gives, and in words what casts doubt on it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conch.machine.facts import MachineFacts
from conch.machine.interference import THROTTLED, Interference
from conch.machine.processes import Rival
from conch.perf.figures.confidence import Confidence
from conch.perf.figures.generation import GenerationFigures
from conch.perf.figures.latency import WindowFigures
from conch.perf.figures.stability import WINDOWS
from conch.perf.senders.records import Records
from conch.perf.server.resources import MetricFigures, ResourceFigures
from conch.perf.server.statistics import ServerFigures

#: A process that computes for more than this share of its time is what limits a measurement.
BUSY: Final = 0.85
#: A result above this share of what the senders can do is theirs as well as the server's: a sender that is busy for so
#: much of its time lets a request wait for twice as long as it takes to send one (M/D/1: 0.8 / (2 x 0.2)).
NEAR_LIMIT: Final = 0.8


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The machine of the senders while a level was measured: its load averages before and at the end, what others took
    of it during the windows that count, and the busiest of them.

    ``unseen`` is why the server's processes were not seen, in which case all that is known of others is what other
    guests of the host took; empty where they were.
    """

    facts: MachineFacts
    load_before: float
    load_during: float
    interference: Interference
    rivals: tuple[Rival, ...] = ()
    unseen: str = ""

    @property
    def taken(self) -> str:
        """What others took of it, in words."""
        named = f" (mostly {', '.join(map(str, self.rivals))})" if self.rivals and self.interference.disturbs else ""
        return f"{self.interference}{named}"

    def __str__(self) -> str:
        """In a sentence without a full stop."""
        taken = "" if self.unseen else f"; {self.taken}"
        return f"load {self.load_before:.1f} before and {self.load_during:.1f} during{taken}"


@dataclass(frozen=True, slots=True)
class LevelRecords:
    """Every request of the windows that count, their messages ``[messages, 2]`` by row of ``records``, and the windows'
    beginnings and ends (ns, monotonic)."""

    records: Records
    events: NDArray[np.int64]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One level: ``figures`` over the windows that count, and what the server counted in them.

    Those are the last undisturbed windows that agree; the last ones, if none do, or if the machine was never quiet.
    ``generation`` is there where answers are text.

    ``stable`` says whether they agree, ``disturbed`` that others used the machine in them; ``busy`` is how much of its
    time the busiest sender computed; ``errors`` counts what went wrong, by message; ``unfinished`` are requests that
    had not ended when the last window did, for at least ``oldest`` seconds.

    ``runs`` are the figures of each run, where there were several, and ``confidence`` is over them, otherwise over
    windows.  ``limit`` is how many requests a second the senders can do at this level (None: not measured).  ``gone``
    is what happened when the server was asked whether it still answers, empty while it does; ``stopped`` says that the
    level was ended before its time; ``missing`` are those of a wanted number of requests that had not ended when the
    server was given up.  ``rate`` is how many requests a second were due (0: as many as callers sent).  ``sent`` says
    in words what requests had.  ``records`` are there if the plan keeps them.
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
    #: Not compared: equal figures are of equal records.
    records: LevelRecords | None = field(default=None, compare=False, repr=False)

    @property
    def failed(self) -> int:
        """How many requests were not answered well, in the windows that count."""
        return sum(self.figures.failures.values())

    @property
    def whole(self) -> bool:
        """Whether every request was answered well, and the level was measured to its end."""
        wrong = self.failed or self.errors or self.gone or self.stopped or self.missing
        return bool(self.figures.requests) and not wrong

    @property
    def warnings(self) -> Iterator[str]:
        """What casts doubt on the figures, in a sentence each."""
        yield from self._of_answers()
        if self.disturbed and self.machine is not None:
            yield f"disturbed: {self.machine.taken}; {len(self._quiet())} of {len(self.windows)} windows were quiet"
        throttled = self.machine.interference.throttled if self.machine is not None else 0.0
        if throttled > THROTTLED:
            yield (
                f"for {throttled:.0%} of the time the quota of processor time was used up (throttling): the figures are"
                " those of a machine with this quota"
            )
        if self.busy > BUSY:
            yield (
                f"the senders computed for {self.busy:.0%} of the time, so the server may be faster than this shows:"
                " use more processes, or another machine"
            )
        if self.limit and self._per_second > NEAR_LIMIT * self.limit:
            yield (
                f"{self._per_second:,.0f} requests a second are {self._per_second / self.limit:.0%} of the"
                f" {self.limit:,.0f} that the senders can do at this level, so the figures are theirs as well as the"
                " server's"
            )

    def _of_answers(self) -> Iterator[str]:
        if self.gone:
            after = f"after {self.figures.requests} answers" if self.figures.requests else "without any answer"
            yield f"the server stopped answering, {after}: {self.gone}"
        elif not self.figures.requests:
            yield self._silence()
        elif self.stopped:
            count = len(self.windows)
            yield f"stopped after {count} {'window' if count == 1 else 'windows'}"
        elif self.missing:
            ended = self.figures.requests + self.failed
            yield (
                f"only {ended} of {ended + self.missing} requests have ended: the others wait for up to"
                f" {self.oldest:.1f} s, and the figures are without them"
            )
        elif len(self.windows) < WINDOWS and not self.stable:
            yield f"{len(self.windows)} of the {WINDOWS} windows that have to agree were taken: allow more (-r)"
        elif not self.stable:
            yield f"the last {WINDOWS} windows do not agree: measure longer (-p), or allow more (-s)"
        if self._behind:
            answered = self.figures.requests / self.figures.seconds
            yield (
                f"{answered:.1f} of {self.rate:g} requests a second were answered and {self.unfinished} wait, for up to"
                f" {self.oldest:.1f} s: latencies grow for as long as this goes on"
            )
        if self.failed:
            sent = self.failed + self.figures.requests
            yield f"{self.failed} of {sent} requests failed and are not among the latencies"

    @property
    def _behind(self) -> bool:
        """Whether fewer requests ended than were due, by more than random arrivals differ."""
        due, ended = self.rate * self.figures.seconds, self.figures.requests + self.failed
        return bool(self.figures.requests) and due - ended > max(0.05 * due, 4 * due**0.5)

    def _silence(self) -> str:
        seconds = sum(window.seconds for window in self.windows)
        if self.failed:
            return f"no request was answered well in {seconds:.1f} s"
        return (
            f"no request was answered in {seconds:.1f} s, {self.unfinished} wait for up to {self.oldest:.1f} s: the"
            " server hangs, or windows are too short for its answers (-p)"
        )

    def _quiet(self) -> list[WindowFigures]:
        return [window for window in self.windows if not (window.interference and window.interference.disturbs)]

    @property
    def _per_second(self) -> float:
        return (self.figures.requests + self.failed) / self.figures.seconds if self.figures.seconds else 0.0
