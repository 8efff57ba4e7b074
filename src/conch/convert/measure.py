"""Latency of several networks at one shape, in turns, so that a machine that slows down slows all of them.

Used by ``conch convert`` in its process.  The clock is passed in, so that tests need none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from conch.checkpoints.manifest import Latency

#: The length of a network's turn, and the most runs in it.  The first run of a turn is not counted: threads of the
#: network before may still be spinning, and caches hold its weights.
TURN_SECONDS: Final = 0.05
MAX_RUNS_PER_TURN: Final = 20
#: Rounds that are run however slow the networks are, and figures of each network that are enough for percentiles.
MIN_ROUNDS: Final = 3
MAX_FIGURES: Final = 300
#: A first run that takes longer is warm-up enough: what it spends on preparations no longer counts.
SLOW_SECONDS: Final = 0.25

#: One run of a network; returns the seconds of what is measured in it, which may be several steps.
Run = Callable[[], Sequence[float]]


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """Rows of a batch, and tokens of each."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(slots=True)
class _Measured:
    """One network so far: its figures, and about how long a run takes, in seconds."""

    run: Run
    seconds: list[float] = field(default_factory=list)
    run_seconds: float = 0.0

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Run once, which allocates and may compile; if that was not slow, once more, to see how long a run takes."""
        for _ in range(2):
            before = clock()
            self.run()
            self.run_seconds = clock() - before
            if self.run_seconds > SLOW_SECONDS:
                return

    def take_turn(self) -> None:
        if self.run_seconds < TURN_SECONDS:
            self.run()
        for _ in range(min(MAX_RUNS_PER_TURN, max(1, int(TURN_SECONDS / max(self.run_seconds, 1e-6))))):
            self.seconds += self.run()


def measure(
    runs: Mapping[str, Run], shape: Shape, *, budget: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Latency]:
    """The latency of each network at ``shape``, in about ``budget`` seconds for all of them.

    Rounds go on until the budget is spent, but there are at least ``MIN_ROUNDS``; within a round each network has one
    turn, and every round begins with the next network.  What a network raises is raised.
    """
    measured = {name: _Measured(run) for name, run in runs.items()}
    start = clock()
    for network in measured.values():
        network.warm_up(clock)
    order = list(measured.values())
    rounds = 0
    while order and (rounds < MIN_ROUNDS or clock() - start < budget):
        for network in order:
            network.take_turn()
        order = order[1:] + order[:1]
        rounds += 1
        if rounds >= MIN_ROUNDS and all(len(network.seconds) >= MAX_FIGURES for network in order):
            break
    return {name: summary(shape, network.seconds) for name, network in measured.items()}


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Run:
    """A run that measures one call of ``call``."""

    def run() -> Sequence[float]:
        before = clock()
        call()
        return (clock() - before,)

    return run


def summary(shape: Shape, seconds: Sequence[float]) -> Latency:
    """The figures of the manifest, in milliseconds, from durations in seconds."""
    values = np.asarray(seconds, np.float64) * 1000
    p95, p99 = np.percentile(values, [95, 99])
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    figures = (values.mean(), deviation, values.min(), values.max(), np.median(values), p95, p99)
    return Latency(shape.batch, shape.tokens, *(round(float(figure), 4) for figure in figures))


def budgets(shapes: Sequence[Shape], seconds: float) -> dict[Shape, float]:
    """The time for each shape: by the square root of its tokens, as small shapes vary more and large ones cost more."""
    weights = {shape: (shape.batch * shape.tokens) ** 0.5 for shape in shapes}
    total = sum(weights.values())
    return {shape: seconds * weight / total for shape, weight in weights.items()}


def by_shape(latencies: Sequence[Latency]) -> dict[Shape, Latency]:
    """Index latencies by the shape at which they were measured."""
    return {Shape(latency.batch, latency.tokens): latency for latency in latencies}


def speed_up(latency: Sequence[Latency], reference: Sequence[Latency]) -> float:
    """How many times faster than ``reference`` at the same shapes: the geometric mean of the medians' ratios."""
    variant, torch = by_shape(latency), by_shape(reference)
    ratios = [torch[shape].median_ms / variant[shape].median_ms for shape in variant if shape in torch]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")
