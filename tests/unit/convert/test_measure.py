"""Latencies measured in turns, on a clock of the test's own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from conch.convert.measure import MAX_FIGURES, MIN_ROUNDS, Run, Shape, budgets, measure, speed_up, summary, timed

SHAPE = Shape(2, 8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def runs(self, **seconds: float) -> dict[str, Run]:
        """Networks that take so many seconds of the clock."""
        return {name: timed(partial(self.pass_time, name, one), self) for name, one in seconds.items()}

    def pass_time(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.log.append(name)


def test_latency_is_what_a_run_takes() -> None:
    clock = Clock()

    found = measure(clock.runs(a=0.002, b=0.004), SHAPE, budget=1, clock=clock)

    assert found["a"].median_ms == pytest.approx(2)
    assert (found["b"].batch, found["b"].tokens, found["b"].max_ms) == (2, 8, pytest.approx(4))


def test_networks_take_turns_and_each_round_begins_with_another() -> None:
    clock = Clock()

    measure(clock.runs(a=1.0, b=1.0, c=1.0), SHAPE, budget=0, clock=clock)

    assert "".join(clock.log) == "abc" + "abc" + "bca" + "cab"


def test_budget_is_kept_where_runs_are_short() -> None:
    clock = Clock()

    measure(clock.runs(a=0.02, b=0.03), SHAPE, budget=2, clock=clock)

    assert 2 <= clock.now < 2.5


def test_slow_networks_get_their_rounds_all_the_same() -> None:
    clock = Clock()

    measure(clock.runs(a=100.0), SHAPE, budget=1, clock=clock)

    assert len(clock.log) == 1 + MIN_ROUNDS


def test_enough_runs_are_enough() -> None:
    clock = Clock()

    measure(clock.runs(a=0.0001), SHAPE, budget=1e6, clock=clock)

    assert len(clock.log) < 2 * MAX_FIGURES


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
