"""Latencies measured in turns, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from conch.backends.native.arrays import Array
from conch.backends.tasks.engines.base import NetworkEngine
from conch.convert.measure import LEAST_ROUNDS, MOST_RUNS, Shape, budgets, measure, speed_up, summary

SHAPE = Shape(2, 8)
ARRAYS = {"input_ids": np.zeros((2, 8), np.int64)}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now


class Slow(NetworkEngine):
    """Takes ``seconds`` of the clock."""

    def __init__(self, name: str, clock: Clock, seconds: float) -> None:
        self.name, self.clock, self.seconds = name, clock, seconds

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        assert arrays is ARRAYS
        self.clock.now += self.seconds
        self.clock.log.append(self.name)
        return {}


def engines(clock: Clock, **seconds: float) -> dict[str, NetworkEngine]:
    return {name: Slow(name, clock, one) for name, one in seconds.items()}


def test_latency_is_what_a_run_takes() -> None:
    clock = Clock()

    found = measure(engines(clock, a=0.002, b=0.004), SHAPE, ARRAYS, budget=1, clock=clock)

    assert found["a"].median_ms == pytest.approx(2)
    assert (found["b"].batch, found["b"].tokens, found["b"].max_ms) == (2, 8, pytest.approx(4))


def test_engines_take_turns_and_each_round_begins_with_another() -> None:
    clock = Clock()

    measure(engines(clock, a=1.0, b=1.0, c=1.0), SHAPE, ARRAYS, budget=0, clock=clock)

    assert "".join(clock.log) == "abc" + "abc" + "bca" + "cab"


def test_budget_is_kept_where_runs_are_short() -> None:
    clock = Clock()

    measure(engines(clock, a=0.02, b=0.03), SHAPE, ARRAYS, budget=2, clock=clock)

    assert 2 <= clock.now < 2.5


def test_slow_engines_get_their_rounds_all_the_same() -> None:
    clock = Clock()

    measure(engines(clock, a=100.0), SHAPE, ARRAYS, budget=1, clock=clock)

    assert len(clock.log) == 1 + LEAST_ROUNDS


def test_enough_runs_are_enough() -> None:
    clock = Clock()

    measure(engines(clock, a=0.0001), SHAPE, ARRAYS, budget=1e6, clock=clock)

    assert len(clock.log) < 2 * MOST_RUNS


def test_figures_of_a_sample() -> None:
    one = summary(SHAPE, [n / 1000 for n in range(1, 101)])

    assert (one.mean_ms, one.min_ms, one.max_ms, one.median_ms) == (50.5, 1, 100, 50.5)
    assert one.p95_ms == pytest.approx(95.05)
    assert one.p99_ms == pytest.approx(99.01)
    assert one.sd_ms == pytest.approx(29.0115)


def test_speed_up_is_the_geometric_mean_over_the_shapes() -> None:
    def latencies(*medians: float) -> list:  # type: ignore[type-arg]
        return [summary(Shape(n + 1, 8), [median / 1000]) for n, median in enumerate(medians)]

    assert speed_up(latencies(1, 10), latencies(4, 10)) == pytest.approx(2)
    assert speed_up(latencies(1), latencies(4, 10)) == pytest.approx(4)
    assert np.isnan(speed_up([], latencies(1)))


def test_time_is_divided_among_the_shapes() -> None:
    shares = budgets([Shape(1, 16), Shape(4, 16)], 30)

    assert shares == {Shape(1, 16): pytest.approx(10), Shape(4, 16): pytest.approx(20)}
