"""The best configuration beside the default in final rounds, and what is recommended after them."""

from __future__ import annotations

from typing import Any

import pytest

from conch.measure.analyze.judging.goals import Constraint, Goals, WeightedObjective
from conch.measure.analyze.judging.ranking import (
    DefaultComparison,
    FinalRound,
    FinalRounds,
    Recommendation,
    compare,
    rank,
    recommend,
)
from conch.measure.analyze.results import Point
from tests.unit.measure.analyze.points import goals, point, result

BOUND = goals(constraints=[Constraint("latency_p99", maximum=0.05)])


def rounds(*throughputs: tuple[float, float], disturbed: int = 0) -> FinalRounds:
    """Rounds of the default's throughput and the best one's, the first ones disturbed."""
    return FinalRounds("m_config_1", [
        FinalRound(point(best, disturbed=number < disturbed), (point(default),))
        for number, (default, best) in enumerate(throughputs)
    ])  # fmt: skip


def compared(
    final: FinalRounds | None, wanted: Goals | None = None, winner: Point | None = None
) -> DefaultComparison | None:
    found = [result("m_config_default", point(100)), result("m_config_1", winner or point(300), instances=2)]
    return compare(final, rank(found, wanted or goals()), wanted or goals())


def recommended(
    final: FinalRounds | None, wanted: Goals | None = None, *, default: Point | None = None, **more: Any
) -> Recommendation:
    found = [result("m_config_default", default or point(100)), result("m_config_1", point(300), instances=2)]
    return recommend(found, wanted or goals(), final, **{"complete": True, **more})


def test_the_ratio_is_that_of_points_taken_together_however_the_machine_drifts() -> None:
    found = compared(rounds((100, 201), (50, 100), (80, 159)))
    assert found is not None and found.interval is not None
    assert found.ratio == pytest.approx(2.0, rel=0.01) and found.better
    assert 1.95 < found.interval.low < 2.0 < found.interval.high < 2.05


def test_a_single_round_proves_nothing() -> None:
    found = compared(rounds((100, 300)))
    assert found is not None and found.interval is None and not found.better


def test_disturbed_rounds_count_where_there_are_too_few_others() -> None:
    quiet = compared(rounds((100, 500), (100, 200), (100, 202), disturbed=1))
    assert quiet is not None and quiet.ratio == pytest.approx(2.0, rel=0.01) and not quiet.disturbed
    disturbed = compared(rounds((100, 210), (100, 200), (100, 202), disturbed=2))
    assert disturbed is not None and disturbed.disturbed


def test_what_is_compared_is_what_is_wanted() -> None:
    one = FinalRound(point(50, p99=0.1), (point(100, p99=0.2),))
    latency = goals(WeightedObjective("latency_p99"))
    found = compared(FinalRounds("m_config_1", [one, one]), latency, point(50, p99=0.001))
    assert found is not None and found.ratio == pytest.approx(2.0)


def test_rounds_without_answers_say_nothing() -> None:
    assert compared(FinalRounds("m_config_1", [])) is None
    assert compared(None) is None
    assert compared(rounds((100, 0))) is None


def test_rounds_of_another_candidate_or_load_say_nothing() -> None:
    assert compared(rounds((100, 200), (100, 200))) is not None
    assert compared(FinalRounds("m_config_2", rounds((100, 200)).rounds)) is None
    assert compared(rounds((100, 200), (100, 200)), winner=point(300, load=16)) is None


def test_the_default_counts_at_the_load_at_which_it_is_better() -> None:
    one = FinalRound(point(1100, load=24), (point(900, load=16), point(1275, load=24)))
    final = FinalRounds("m_config_1", [one, one, one])
    found = compared(final, winner=point(1200, load=24))
    assert found is not None and found.default.load == 24 and found.worse


def test_a_load_at_which_the_default_breaks_a_bound_does_not_count() -> None:
    one = FinalRound(point(200, load=24), (point(100, load=16), point(400, p99=0.08, load=24)))
    found = compared(FinalRounds("m_config_1", [one, one]), BOUND, point(300, load=24))
    assert found is not None and found.default.load == 16 and found.better


def test_a_winner_is_used_if_it_was_better_in_the_final_rounds() -> None:
    assert recommended(rounds((100, 200), (101, 202), (99, 201))).advice == "use"


@pytest.mark.parametrize(
    ("final", "advice", "reason"),
    [
        (None, "unproven", "was not compared with the default"),
        (rounds((100, 80), (101, 80), (99, 80)), "keep", "the default was better than m_config_1"),
        (rounds((100, 120), (100, 90), (100, 105)), "keep", "not better than the default by more than the noise"),
        (rounds((100, 200), (100, 200), disturbed=1), "unproven", "other processes used the machine"),
    ],
)
def test_a_winner_that_is_not_proven_to_be_better_is_not_used(
    final: FinalRounds | None, advice: str, reason: str
) -> None:
    found = recommended(final)
    assert found.advice == advice and reason in found.reason


def test_a_disturbed_default_is_not_proven_to_be_the_best() -> None:
    results = [result("m_config_default", point(100, disturbed=True)), result("m_config_1", point(50, disturbed=True))]
    found = recommend(results, goals(), None, complete=True)
    assert found.advice == "unproven" and "other processes used the machine" in found.reason


def test_an_interrupted_search_recommends_nothing() -> None:
    found = recommended(rounds((100, 200), (100, 200)), complete=False)
    assert found.advice == "unproven" and "the search was interrupted" in found.reason


def test_a_winner_that_breaks_a_bound_when_it_is_measured_again_is_not_used() -> None:
    one = FinalRound(point(300, p99=0.06), (point(100),))
    found = recommended(FinalRounds("m_config_1", [one, one]), BOUND)
    assert found.advice == "unproven" and "did not satisfy the constraints" in found.reason


def test_a_winner_is_used_if_the_default_keeps_the_bounds_at_no_load() -> None:
    slow = point(900, p99=0.2)
    one = FinalRound(point(300), (slow,))
    assert recommended(FinalRounds("m_config_1", [one, one]), BOUND, default=slow).advice == "use"


def test_a_default_that_misses_a_bound_by_noise_is_compared_all_the_same() -> None:
    near = point(400, p99=0.0504)
    one = FinalRound(point(300), (near,))
    assert recommended(FinalRounds("m_config_1", [one, one]), BOUND, default=near).advice == "keep"


def test_a_default_whose_higher_loads_others_disturbed_may_be_better_than_it_seems() -> None:
    default = result("m_config_default", point(100), point(300, p99=0.2, load=16, disturbed=True))
    found = recommend(
        [default, result("m_config_1", point(300), instances=2)], BOUND, rounds((100, 200), (100, 200)), complete=True
    )
    assert found.advice == "unproven" and "the default's best load" in found.reason
