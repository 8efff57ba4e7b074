"""Scores and violations of points, and when a measurement is hopeless."""

from __future__ import annotations

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals, Price, WeightedObjective, value_of
from conch.measure.analyze.judging.objectives import excess, hopeless, score, violations
from conch.measure.analyze.results import Point
from tests.unit.measure.analyze.points import figures, goals, point

THROUGHPUT, P99 = WeightedObjective("throughput"), WeightedObjective("latency_p99")


def test_more_throughput_and_less_of_everything_else_is_better() -> None:
    assert score(point(200), point(100), goals()) == pytest.approx(2)
    assert score(point(p99=0.01), point(p99=0.02), goals(P99)) == pytest.approx(2)
    assert score(point(memory=10**9), point(memory=4 * 10**9), goals(WeightedObjective("memory"))) == pytest.approx(4)


def test_weights_say_how_much_each_objective_counts() -> None:
    both = goals(WeightedObjective("throughput", 3), WeightedObjective("latency_p99", 1))
    assert score(point(200, p99=0.04), point(100, p99=0.02), both) == pytest.approx(2**0.5)


@given(*[st.tuples(st.floats(0.01, 1e6), st.floats(1e-5, 100))] * 3)
def test_scores_can_be_compared_whatever_they_are_beside(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]
) -> None:
    one, two, three = (point(throughput, p99=p99) for throughput, p99 in (a, b, c))
    both = goals(THROUGHPUT, P99)
    assert isclose(score(one, two, both) * score(two, three, both), score(one, three, both), rel_tol=1e-6)
    assert isclose(score(one, two, both), 1 / score(two, one, both), rel_tol=1e-6)


def test_models_count_by_their_weights() -> None:
    wanted = Goals({"a": ModelGoals(weight=1), "b": ModelGoals(weight=3)})
    before = Point(1, {"a": figures(100), "b": figures(100)}, None)
    after = Point(1, {"a": figures(100), "b": figures(200)}, None)
    assert score(after, before, wanted) == pytest.approx(2 ** (3 / 4))


def test_what_answered_nothing_scores_nothing() -> None:
    silent = Point(8, {"m": figures(0, 0, requests=0)}, None)
    assert score(silent, point(), goals(P99)) == 0
    assert value_of("latency_p99", silent, "m", Price()) is None
    assert excess(silent, goals()) == inf


def test_cost_is_what_a_million_inferences_take() -> None:
    two_cores_one_gigabyte = point(100, memory=10**9)
    assert value_of("cost", two_cores_one_gigabyte, "m", Price(machine=3.6)) == pytest.approx(10)
    assert value_of("cost", two_cores_one_gigabyte, "m", Price(core=1.8, gigabyte=0.0)) == pytest.approx(10)
    unknown = Point(8, {"m": figures(100)}, None)
    assert value_of("cost", unknown, "m", Price()) is None
    assert value_of("cost", unknown, "m", Price(machine=3.6)) == pytest.approx(10)


def test_violations_say_what_is_and_what_must_be() -> None:
    bounds = [Constraint("latency_p99", maximum=0.01), Constraint("throughput", minimum=400), Constraint("memory", 1e9)]
    broken = list(violations(point(100, p99=0.015), goals(constraints=bounds)))
    assert [str(one) for one in broken] == [
        "p99 latency is 15.0 ms and must be at most 10.0 ms",
        "throughput is 100 infer/s and must be at least 400 infer/s",
    ]
    assert [one.excess for one in broken] == pytest.approx([0.5, 3])


def test_a_window_that_is_a_little_worse_is_not_hopeless() -> None:
    assert not hopeless([point(70)], point(100), goals())
    assert hopeless([point(60)], point(100), goals())


def test_two_windows_say_more_than_one() -> None:
    assert not hopeless([point(70)], point(100), goals())
    assert hopeless([point(70), point(70)], point(100), goals())


def test_a_server_that_gets_faster_is_given_time() -> None:
    assert not hopeless([point(30), point(60)], point(100), goals())


def test_a_constraint_that_is_broken_beyond_doubt_ends_it_though_it_is_faster() -> None:
    bounded = goals(constraints=[Constraint("latency_p99", maximum=0.02)])
    assert hopeless([point(200, p99=0.03)], point(100, p99=0.01), bounded)
    assert not hopeless([point(200, p99=0.025)], point(100, p99=0.01), bounded)


def test_nothing_is_hopeless_while_none_keeps_the_constraints() -> None:
    bounded = goals(constraints=[Constraint("latency_p99", maximum=0.001)])
    assert not hopeless([point(1)], point(100), bounded)
    assert not hopeless([point(1)], None, goals())


def test_windows_that_do_not_know_the_memory_do_not_end_a_measurement() -> None:
    window = Point(8, {"m": figures(100)}, None)
    bounded = goals(constraints=[Constraint("memory", maximum=4e9)])
    assert not hopeless([window], point(100), bounded)
    assert not hopeless([window], point(100), goals(WeightedObjective("memory")))
    assert hopeless([Point(8, {"m": figures(50)}, None)], point(100), bounded)
