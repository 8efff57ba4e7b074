"""Latency of several networks at several shapes, in turns, so that a machine that slows down slows all of them.

Used by ``conch convert`` in its process.  Clocks are passed in, so that tests need none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from conch.checkpoints.manifest import Latency
from conch.machine.interference import Interference
from conch.texts.shapes import Shape

#: The length of a network's turn, and the most runs in it.  The first run of a turn is not counted: threads of the
#: network before may still be spinning, and caches hold its weights.
TURN_SECONDS: Final = 0.05
MAX_RUNS_PER_TURN: Final = 20
#: Rounds that each shape gets if there is time for them, and undisturbed ones that are enough for its figures.
MIN_ROUNDS: Final = 3
MIN_QUIET: Final = 2
#: The share of the time after which shapes that were disturbed are measured again, or all of them if none was.
FIRST_PASS: Final = 0.6
#: A first run that takes longer is warm-up enough: what it spends on preparations no longer counts.
SLOW_SECONDS: Final = 0.25
#: Quartiles further apart, as a share of the median, are of a machine that is not at rest, whoever disturbs it.
MAX_SPREAD: Final = 0.5

#: One run of a network; returns the seconds of what is measured in it, which may be several steps.
Run = Callable[[], Sequence[float]]


@dataclass(slots=True)
class _Measured:
    """One network at one shape so far: its figures of quiet and of disturbed rounds, and about how long a run takes,
    all in seconds."""

    run: Run
    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    run_seconds: float = 0.0

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Run once, which allocates and may compile; if that was not slow, once more, to see how long a run takes."""
        for _ in range(2):
            before = clock()
            self.run()
            self.run_seconds = clock() - before
            if self.run_seconds > SLOW_SECONDS:
                return

    def take_turn(self) -> list[float]:
        """The figures of some runs."""
        if self.run_seconds < TURN_SECONDS:
            self.run()
        runs = min(MAX_RUNS_PER_TURN, max(1, int(TURN_SECONDS / max(self.run_seconds, 1e-6))))
        return [seconds for _ in range(runs) for seconds in self.run()]


class _Rounds:
    """All networks at one shape.  Within a round each has one turn, and every round begins with the next network."""

    def __init__(self, shape: Shape, runs: Mapping[str, Run]) -> None:
        self.shape = shape
        self.networks = {name: _Measured(run) for name, run in runs.items()}
        self._order = list(self.networks.values())
        self.quiet = self.disturbed = 0
        self.seconds = 0.0

    @property
    def settled(self) -> bool:
        """Whether the quiet rounds are enough, or the only ones."""
        return self.quiet >= MIN_QUIET or not self.disturbed

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Run each network, and guess how long a round takes."""
        for network in self._order:
            network.warm_up(clock)
        self.seconds = sum(max(network.run_seconds, TURN_SECONDS) for network in self._order)

    def take(self, clock: Callable[[], float], others: Callable[[], Interference]) -> None:
        """One round; ``others`` tells what others took since it was called before."""
        before = clock()
        others()
        figures = [network.take_turn() for network in self._order]
        disturbed = others().disturbs
        for network, seconds in zip(self._order, figures, strict=True):
            (network.disturbed if disturbed else network.quiet).extend(seconds)
        self.disturbed, self.quiet = self.disturbed + disturbed, self.quiet + (not disturbed)
        self._order = self._order[1:] + self._order[:1]
        self.seconds = clock() - before

    def latencies(self) -> dict[str, Latency]:
        """Each network's figures of quiet rounds, or of all rounds where the machine was too busy."""
        return {
            name: summary(
                self.shape, network.quiet if self.settled else network.quiet + network.disturbed, busy=not self.settled
            )
            for name, network in self.networks.items()
        }  # fmt: skip


def measure(
    runs: Mapping[Shape, Mapping[str, Run]],
    seconds: float,
    *,
    others: Callable[[], Interference],
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, list[Latency]]:
    """The latencies of each network at each shape, in about ``seconds`` for all of them.

    ``others`` tells what others took of the machine since it was called before.  Rounds that were disturbed are
    repeated while there is time, and their figures used, marked as busy, where too few others are left.  Every network
    runs at every shape twice at least, however little time there is.  What a network raises is raised.
    """
    start = clock()
    shapes = [_Rounds(shape, of_shape) for shape, of_shape in runs.items() if of_shape]
    progress("warming up")
    for rounds in shapes:
        rounds.warm_up(clock)
    for rounds, until in zip(shapes, _deadlines(shapes, clock(), start + seconds * FIRST_PASS), strict=True):
        progress(f"measuring {rounds.shape} tokens")
        _fill(rounds, until, clock, others, least=1)
    disturbed = [rounds for rounds in shapes if not rounds.settled]
    if disturbed:
        progress(f"the machine was busy, measuring again: {', '.join(str(rounds.shape) for rounds in disturbed)}")
    again = disturbed or shapes
    for rounds, until in zip(again, _deadlines(again, clock(), start + seconds), strict=True):
        _fill(rounds, until, clock, others, least=0)
    measured: dict[str, list[Latency]] = {}
    for rounds in shapes:
        for name, latency in rounds.latencies().items():
            measured.setdefault(name, []).append(latency)
    return measured


def _fill(
    rounds: _Rounds, until: float, clock: Callable[[], float], others: Callable[[], Interference], *, least: int
) -> None:
    """Take ``least`` rounds, and more while another one ends before ``until``."""
    taken = 0
    while taken < least or clock() + rounds.seconds <= until:
        rounds.take(clock, others)
        taken += 1
        if rounds.seconds <= 0:
            return  # A clock that stands still.


def _deadlines(shapes: Sequence[_Rounds], now: float, end: float) -> list[float]:
    """When the rounds of each shape end, one after another: ``MIN_ROUNDS`` each if there is time, and the rest by the
    square root of a shape's tokens, as small shapes vary more and large ones cost more."""
    seconds = max(0.0, end - now)
    needed = [MIN_ROUNDS * rounds.seconds for rounds in shapes]
    scale = min(1.0, seconds / sum(needed)) if sum(needed) else 0.0
    weights = [(rounds.shape.batch * rounds.shape.tokens) ** 0.5 for rounds in shapes]
    rest = max(0.0, seconds - sum(needed))
    parts = [scale * need + rest * weight / sum(weights) for need, weight in zip(needed, weights, strict=True)]
    return [now + float(part) for part in np.cumsum(parts)]


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Run:
    """A run that measures one call of ``call``."""

    def run() -> Sequence[float]:
        before = clock()
        call()
        return (clock() - before,)

    return run


def summary(shape: Shape, seconds: Sequence[float], *, busy: bool = False) -> Latency:
    """The figures of the manifest, in milliseconds, from durations in seconds.

    ``busy`` says that others used the processor; figures far apart say the same.
    """
    values = np.asarray(seconds, np.float64) * 1000
    low, median, high, p95, p99 = np.percentile(values, [25, 50, 75, 95, 99])
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    figures = (values.mean(), deviation, values.min(), values.max(), median, p95, p99)
    spread = float((high - low) / median) if median else 0.0
    rounded: Any = (round(float(figure), 4) for figure in figures)
    latency = Latency(shape.batch, shape.tokens, *rounded)
    return replace(latency, runs=len(values), spread=round(spread, 4), busy=busy or spread > MAX_SPREAD)


def by_shape(latencies: Sequence[Latency]) -> dict[Shape, Latency]:
    """Index latencies by the shape at which they were measured."""
    return {Shape(latency.batch, latency.tokens): latency for latency in latencies}


def speed_up(latency: Sequence[Latency], reference: Sequence[Latency]) -> float:
    """How many times faster than ``reference`` at the same shapes: the geometric mean of the medians' ratios."""
    variant, torch = by_shape(latency), by_shape(reference)
    ratios = [torch[shape].median_ms / variant[shape].median_ms for shape in variant if shape in torch]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")
