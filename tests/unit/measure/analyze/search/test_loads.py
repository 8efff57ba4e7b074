"""The loads of a full sweep, and the loads that a search compares candidates at."""

from __future__ import annotations

from collections.abc import Callable

from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.analyze.search.axis import LoadAxis, LoadClimb


def climbed(loads: LoadClimb, throughput: Callable[[float], float], most_kept: float = 1e9) -> list[float]:
    asked = []
    while (load := loads.next()) is not None:
        asked.append(load)
        loads.add(load, throughput(load), load <= most_kept)
    return asked


def test_loads_double_until_throughput_has_not_grown_twice() -> None:
    assert climbed(LoadClimb(LoadAxis(1, 1024), 5), lambda load: min(load, 8)) == [1, 2, 4, 8, 16, 32]


def test_the_highest_load_need_not_be_a_power_of_two() -> None:
    assert climbed(LoadClimb(LoadAxis(3, 20), 5), lambda load: load) == [3, 6, 12, 20]


def test_the_highest_load_that_keeps_the_constraints_is_searched_between_those_around_it() -> None:
    asked = climbed(LoadClimb(LoadAxis(1, 1024), 5), lambda load: load, most_kept=21)
    assert asked == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]


def test_the_search_takes_as_many_steps_as_it_may() -> None:
    assert climbed(LoadClimb(LoadAxis(1, 1024), 1), lambda load: load, most_kept=21)[-2:] == [32, 24]


def test_constraints_that_no_load_keeps_do_not_end_the_climb_early() -> None:
    assert climbed(LoadClimb(LoadAxis(1, 4), 5), lambda load: load, most_kept=0) == [1, 2, 4]


def test_loads_that_the_user_gave_are_all_measured() -> None:
    axis = LoadAxis(1, 1024, (2, 4, 8, 16, 32))
    assert climbed(LoadClimb(axis, 5), lambda load: 1, most_kept=3) == [2, 4, 8, 16, 32]
    assert climbed(LoadClimb(axis, 5, early_exit=True), lambda load: 1) == [2, 4, 8]


def point(load: float, p99: float, throughput: float = 100) -> Point:
    return Point(load, {"m": ModelFigures(throughput, p99, {99: p99}, 0, 0, {}, 100)}, None)


GOALS = Goals({"m": ModelGoals(constraints=(Constraint("latency_p99", maximum=0.1),))})


def test_twice_as_many_callers_as_are_computed_for_at_a_time() -> None:
    axis = LoadAxis(1, 1024)
    assert axis.fitting(16) == 32
    assert axis.fitting(10_000) == 1024


def test_loads_are_doubled_and_halved_within_their_range_or_taken_from_those_that_the_user_gave() -> None:
    axis = LoadAxis(1, 100)
    assert [axis.more(64), axis.more(100), axis.less(5), axis.less(1)] == [100, None, 2, None]
    assert [axis.between(16, 64), axis.between(30, 32)] == [32, None]
    given = LoadAxis(1, 1024, (4, 10, 100))
    assert [given.more(4), given.more(100), given.less(10), given.between(10, 100)] == [10, None, 4, None]


def test_loads_that_the_user_gave_are_the_only_ones() -> None:
    axis = LoadAxis(1, 1024, (4, 10, 100))
    assert [axis.fitting(1), axis.fitting(8), axis.fitting(500)] == [4, 10, 100]


def test_callers_are_fewer_in_proportion_to_the_latency_that_is_too_long() -> None:
    assert LoadAxis(1, 1024).corrected(64, point(64, 0.2), GOALS) == 30
    assert LoadAxis(1, 1024).corrected(64, point(64, 0.05), GOALS) is None
    assert LoadAxis(1, 1024).corrected(1, point(1, 0.2), GOALS) is None


def test_a_rate_that_is_too_high_becomes_one_that_the_server_can_do() -> None:
    assert LoadAxis(1, 1024, rates=True).corrected(500, point(500, 9.0), GOALS) == 90
