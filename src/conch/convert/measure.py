"""Measures the latency of networks alternately at several shapes, so that slowdowns affect all of them.

Used in the process of ``conch convert``. Clocks are parameters, for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from conch.checkpoints.manifest import Latency
from conch.machine.processes import Interference
from conch.measure.texts.shapes import Shape

#: The time per network in a round (s), and the maximum number of runs in it. The first run is not counted, because
#: threads of the previous network may still spin, and caches contain its weights.
TURN_SECONDS: Final = 0.05
MAX_RUNS_PER_TURN: Final = 20
#: The number of rounds per shape if time permits, and of quiet rounds that suffice for its figures.
MIN_ROUNDS: Final = 3
MIN_QUIET: Final = 2
#: The share of the time after which disturbed shapes are measured again, or all if none was disturbed.
FIRST_PASS: Final = 0.6
#: If the first run takes longer (s), it suffices as warm-up, because preparations are a small part of it.
SLOW_SECONDS: Final = 0.25
#: With a larger interquartile range, relative to the median, the machine counts as busy.
MAX_SPREAD: Final = 0.5

#: One run of a network; returns the durations of its measured steps (s).
Run = Callable[[], Sequence[float]]


@dataclass(slots=True)
class _Measured:
    """One network at one shape: durations in quiet and disturbed rounds, approximate time of a run (s)."""

    run: Run
    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    run_seconds: float = 0.0

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Run once, which allocates and may compile; if that was fast, run again to estimate the time of a run."""
        for _ in range(2):
            before = clock()
            self.run()
            self.run_seconds = clock() - before
            if self.run_seconds > SLOW_SECONDS:
                return

    def measure_runs(self) -> list[float]:
        """Return the durations of some runs (s)."""
        if self.run_seconds < TURN_SECONDS:
            self.run()
        runs = min(MAX_RUNS_PER_TURN, max(1, int(TURN_SECONDS / max(self.run_seconds, 1e-6))))
        return [seconds for _ in range(runs) for seconds in self.run()]


class _Rounds:
    """All networks at one shape. Each is measured once per round; every round begins with the next network."""

    def __init__(self, shape: Shape, runs: Mapping[str, Run]) -> None:
        self.shape = shape
        self.networks = {name: _Measured(run) for name, run in runs.items()}
        self._order = list(self.networks.values())
        self.quiet = self.disturbed = 0
        self.seconds = 0.0

    @property
    def settled(self) -> bool:
        """Whether there are enough quiet rounds, or no disturbed ones."""
        return self.quiet >= MIN_QUIET or not self.disturbed

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Run each network, and estimate the time of a round."""
        for network in self._order:
            network.warm_up(clock)
        self.seconds = sum(max(network.run_seconds, TURN_SECONDS) for network in self._order)

    def take(self, clock: Callable[[], float], others: Callable[[], Interference]) -> None:
        """Run one round; ``others`` returns the interference since its last call."""
        before = clock()
        others()
        figures = [network.measure_runs() for network in self._order]
        disturbed = others().disturbs
        for network, seconds in zip(self._order, figures, strict=True):
            (network.disturbed if disturbed else network.quiet).extend(seconds)
        self.disturbed, self.quiet = self.disturbed + disturbed, self.quiet + (not disturbed)
        self._order = self._order[1:] + self._order[:1]
        self.seconds = clock() - before

    def latencies(self) -> dict[str, Latency]:
        """Return each network's figures from quiet rounds, or from all rounds if the machine was too busy."""
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
    """Return the latencies of each network at each shape, measured in about ``seconds`` in total.

    ``others`` returns the interference since its last call. Disturbed rounds are repeated while time remains; if too
    few quiet ones result, their figures are included and marked as busy. Every network runs at every shape at least
    twice, regardless of the time. Exceptions of a network are not caught.
    """
    start = clock()
    shapes = [_Rounds(shape, of_shape) for shape, of_shape in runs.items() if of_shape]
    progress("warming up")
    for rounds in shapes:
        rounds.warm_up(clock)
    for rounds, until in zip(shapes, _deadlines(shapes, clock(), start + seconds * FIRST_PASS), strict=True):
        progress(f"measuring {rounds.shape} tokens")
        _fill(rounds, until, clock, others, minimum=1)
    disturbed = [rounds for rounds in shapes if not rounds.settled]
    if disturbed:
        progress(f"the machine was busy, measuring again: {', '.join(str(rounds.shape) for rounds in disturbed)}")
    again = disturbed or shapes
    for rounds, until in zip(again, _deadlines(again, clock(), start + seconds), strict=True):
        _fill(rounds, until, clock, others, minimum=0)
    measured: dict[str, list[Latency]] = {}
    for rounds in shapes:
        for name, latency in rounds.latencies().items():
            measured.setdefault(name, []).append(latency)
    return measured


def _fill(
    rounds: _Rounds, until: float, clock: Callable[[], float], others: Callable[[], Interference], *, minimum: int
) -> None:
    """Run ``minimum`` rounds, and more while another ends before ``until``."""
    taken = 0
    while taken < minimum or clock() + rounds.seconds <= until:
        rounds.take(clock, others)
        taken += 1
        if rounds.seconds <= 0:
            return  # the clock does not advance


def _deadlines(shapes: Sequence[_Rounds], now: float, end: float) -> list[float]:
    """Return when the rounds of each shape end.

    Each shape gets ``MIN_ROUNDS`` if time permits. The rest is divided by the square root of a shape's tokens, because
    small shapes vary more and large ones cost more.
    """
    seconds = max(0.0, end - now)
    needed = [MIN_ROUNDS * rounds.seconds for rounds in shapes]
    scale = min(1.0, seconds / sum(needed)) if sum(needed) else 0.0
    weights = [(rounds.shape.batch * rounds.shape.tokens) ** 0.5 for rounds in shapes]
    rest = max(0.0, seconds - sum(needed))
    parts = [scale * need + rest * weight / sum(weights) for need, weight in zip(needed, weights, strict=True)]
    return [now + float(part) for part in np.cumsum(parts)]


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Run:
    """Return a run that measures one call of ``call``."""

    def run() -> Sequence[float]:
        before = clock()
        call()
        return (clock() - before,)

    return run


def summary(shape: Shape, seconds: Sequence[float], *, busy: bool = False) -> Latency:
    """Return the manifest's figures (ms) of durations in seconds.

    ``busy`` means that other processes used the processor; widely spread durations imply it.
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
    """Index latencies by shape."""
    return {Shape(latency.batch, latency.tokens): latency for latency in latencies}


def speed_up(latency: Sequence[Latency], reference: Sequence[Latency]) -> float:
    """Return the speed-up over ``reference`` at the same shapes: the geometric mean of the medians' ratios."""
    variant, torch = by_shape(latency), by_shape(reference)
    ratios = [torch[shape].median_ms / variant[shape].median_ms for shape in variant if shape in torch]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")
