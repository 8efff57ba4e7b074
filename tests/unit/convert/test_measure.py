"""Latencies measured in turns, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from conch.checkpoints.manifest import Latency
from conch.convert.measure import Run, measure, speed_up, summary, timed
from conch.machine.processes import Interference
from conch.measure.texts.shapes import Shape

SHAPE = Shape(2, 8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def runs(self, **seconds: float) -> dict[str, Run]:
        """Networks that take so many seconds of the clock."""
        return {name: timed(partial(self.pass_time, name, second), self) for name, second in seconds.items()}

    def pass_time(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.log.append(name)


def quiet() -> Interference:
    return Interference()


def measured(
    clock: Clock, seconds: float, others: Callable[[], Interference] = quiet, **runs: float
) -> dict[str, Latency]:
    """Measure networks at one shape."""
    found = measure({SHAPE: clock.runs(**runs)}, seconds, others=others, clock=clock)
    return {name: latency for name, (latency,) in found.items()}


def test_latency_is_what_a_run_takes() -> None:
    found = measured(Clock(), 1, a=0.002, b=0.004)

    assert found["a"].median_ms == pytest.approx(2)
    assert (found["b"].batch, found["b"].tokens, found["b"].max_ms) == (2, 8, pytest.approx(4))
    assert found["a"].runs > 20 and not found["a"].busy


def test_networks_take_turns_and_each_round_begins_with_another() -> None:
    clock = Clock()

    measured(clock, 20, a=1.0, b=1.0, c=1.0)

    assert "".join(clock.log).startswith("abc" + "abc" + "bca" + "cab" + "abc")


@pytest.mark.parametrize("seconds", [2, 30, 100])
def test_time_that_is_promised_is_taken(seconds: float) -> None:
    clock = Clock()

    runs = {Shape(rows, 16): clock.runs(a=0.01 * rows, b=0.02 * rows) for rows in (1, 4, 8)}
    measure(runs, seconds, others=quiet, clock=clock)

    assert seconds * 0.8 <= clock.now <= seconds * 1.05 + 0.6


def test_slow_networks_run_twice_however_little_time_there_is() -> None:
    clock = Clock()

    found = measured(clock, 1, a=100.0)

    assert (len(clock.log), found["a"].runs) == (2, 1)


def test_little_time_is_divided_by_what_shapes_cost() -> None:
    clock = Clock()

    runs = {Shape(1, 16): clock.runs(small=0.3), Shape(1, 64): clock.runs(large=1.0)}
    measure(runs, 6, others=quiet, clock=clock)

    assert clock.now <= 6.5
    assert clock.log.count("large") >= 3 and clock.log.count("small") >= 3


def test_disturbed_rounds_are_repeated_and_their_figures_left_out() -> None:
    clock = Clock()
    slow = 3.0

    def others() -> Interference:
        """Others work during the first seconds, when everything takes longer."""
        return Interference(0.5 if clock.now < 10 + slow else 0.0)

    def run() -> None:
        clock.pass_time("a", slow if clock.now < 10 else 1.0)

    found = measure({SHAPE: {"a": timed(run, clock)}}, 40, others=others, clock=clock)["a"][0]

    assert (found.busy, found.max_ms) == (False, pytest.approx(1000))


def test_shapes_that_were_disturbed_are_measured_again_before_the_others() -> None:
    clock = Clock()
    said: list[str] = []

    def others() -> Interference:
        return Interference(0.5 if 5 < clock.now < 30 else 0.0)

    runs = {Shape(1, 16): clock.runs(a=1.0), Shape(1, 17): clock.runs(b=1.0)}
    found = measure(runs, 100, others=others, clock=clock, progress=said.append)

    assert not found["a"][0].busy and not found["b"][0].busy

    clock.now = 0

    def beside_b() -> Interference:
        return Interference(stolen=0.5 if clock.log[-1] == "b" else 0.0)

    found = measure(runs, 40, others=beside_b, clock=clock, progress=said.append)

    assert said[-1] == "the machine was busy, measuring again: 1x17"
    assert (found["a"][0].busy, found["b"][0].busy) == (False, True)
    assert found["b"][0].runs > found["a"][0].runs


def test_figures_far_apart_are_busy_under_any_disturbance() -> None:
    assert summary(SHAPE, [1, 1, 2, 2]).busy
    assert not summary(SHAPE, [1, 1, 1.1, 1.1]).busy


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
