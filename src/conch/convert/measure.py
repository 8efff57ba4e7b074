"""Latency of several networks on the same inputs, in turns, so that a machine that slows down slows all of them.

Used by ``conch convert`` in its process.  The clock is passed in, so that tests need none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.manifest import Latency

#: Runs of one network before it is the next one's turn.  The first of a turn is not counted: threads of the one
#: before may still be spinning, and caches hold its weights.
TURN_SECONDS: Final = 0.05
MOST_PER_TURN: Final = 20
#: Rounds that are run however slow the networks are, and runs of each that are enough for percentiles.
LEAST_ROUNDS: Final = 3
#: Above this, one run is warm-up enough: what a first run spends on itself no longer counts.
SLOW_SECONDS: Final = 0.25
MOST_RUNS: Final = 300


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """Rows of a batch, and tokens of each."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(slots=True)
class _Turns:
    """One network at one shape, so far."""

    seconds: list[float] = field(default_factory=list)
    estimate: float = 0.0


def measure(
    engines: Mapping[str, NetworkEngine],
    shape: Shape,
    arrays: Mapping[str, Array],
    *,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Latency]:
    """The latency of each engine on ``arrays`` (``[batch, tokens]``), in about ``budget`` seconds for all of them.

    Rounds go on until the budget is spent, but there are at least ``LEAST_ROUNDS``; within a round each engine has
    one turn, and every round begins with the next one.  What an engine raises is raised.
    """
    turns = {name: _Turns() for name in engines}
    start = clock()
    for name, engine in engines.items():
        _warm_up(engine, arrays, turns[name], clock)
    order = list(engines)
    rounds = 0
    while order and (rounds < LEAST_ROUNDS or clock() - start < budget):
        for name in order:
            _turn(engines[name], arrays, turns[name], clock)
        order = order[1:] + order[:1]
        rounds += 1
        if rounds >= LEAST_ROUNDS and all(len(one.seconds) >= MOST_RUNS for one in turns.values()):
            break
    return {name: summary(shape, one.seconds) for name, one in turns.items()}


def _warm_up(engine: NetworkEngine, arrays: Mapping[str, Array], turns: _Turns, clock: Callable[[], float]) -> None:
    """The first run of a shape allocates and may compile; unless it was slow, a second one tells how long one takes."""
    for _ in range(2):
        before = clock()
        engine.run(arrays)
        turns.estimate = clock() - before
        if turns.estimate > SLOW_SECONDS:
            return


def _turn(engine: NetworkEngine, arrays: Mapping[str, Array], turns: _Turns, clock: Callable[[], float]) -> None:
    if turns.estimate < TURN_SECONDS:
        engine.run(arrays)
    runs = min(MOST_PER_TURN, max(1, int(TURN_SECONDS / max(turns.estimate, 1e-6))))
    for _ in range(runs):
        before = clock()
        engine.run(arrays)
        turns.seconds.append(clock() - before)


def summary(shape: Shape, seconds: Sequence[float]) -> Latency:
    """The figures of a table, from durations in seconds."""
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


def speed_up(latency: Sequence[Latency], reference: Sequence[Latency]) -> float:
    """How many times faster than ``reference`` at the same shapes: the geometric mean of the medians' ratios."""
    medians = {(one.batch, one.tokens): one.median_ms for one in reference}
    ratios = [medians[one.batch, one.tokens] / one.median_ms for one in latency if (one.batch, one.tokens) in medians]
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else float("nan")
