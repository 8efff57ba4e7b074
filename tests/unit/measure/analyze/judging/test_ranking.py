"""The ranking: who wins, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

from conch.measure.analyze.judging.goals import Constraint, WeightedObjective
from conch.measure.analyze.judging.ranking import rank
from tests.unit.measure.analyze.points import goals, point, result

P99 = Constraint("latency_p99", maximum=0.03)
DEFAULT = result("m_config_default", point(100))


def test_the_best_score_wins_and_is_reported_beside_the_default() -> None:
    ranking = rank([DEFAULT, result("two", point(180), point(200), instances=2)], goals())
    assert ranking.winner is not None and ranking.default is not None
    assert (ranking.winner.name, ranking.winner.score, ranking.winner.point.throughput) == ("two", 2.0, 200)
    assert ranking.default.score == 1.0
    assert [row.rank for row in ranking.rows] == [1, 2]


def test_what_breaks_a_constraint_comes_after_all_that_keep_it() -> None:
    fast = result("fast", point(500, p99=0.05), instances=2)
    ranking = rank([DEFAULT, fast], goals(constraints=[P99]))
    assert ranking.winner is not None and ranking.winner.name == "m_config_default"
    assert ranking.rows[1].violations[0].constraint == P99


def test_the_best_point_of_a_candidate_is_one_that_keeps_the_constraints() -> None:
    one = result("one", point(90, load=4), point(500, p99=0.05, load=64), instances=2)
    ranking = rank([result("m_config_default", point(50)), one], goals(constraints=[P99]))
    assert ranking.winner is not None and ranking.winner.point.load == 4


def test_without_a_candidate_that_keeps_the_constraints_the_nearest_is_first() -> None:
    far, near = result("far", point(500, p99=0.9), instances=2), result("near", point(50, p99=0.04), instances=3)
    ranking = rank([result("m_config_default", point(100, p99=0.5)), far, near], goals(constraints=[P99]))
    assert ranking.winner is None
    assert [row.name for row in ranking.rows] == ["near", "m_config_default", "far"]
    assert [str(violation) for violation in ranking.rows[0].violations] == [
        "p99 latency is 40.0 ms and must be at most 30.0 ms"
    ]


def test_of_what_is_within_the_noise_the_simplest_wins() -> None:
    ranking = rank(
        [
            result("m_config_default", point(50)),
            result("five", point(202), instances=5),
            result("two", point(200), instances=2),
        ],
        goals(),
    )
    assert ranking.winner is not None and ranking.winner.name == "two"
    assert [row.tied for row in ranking.rows] == [True, True, False]


def test_less_memory_is_simpler_where_instances_are_as_many() -> None:
    big = result("big", point(201, memory=4 * 10**9), overrides={"max_batch_size": 64})
    small = result("small", point(200, memory=10**9), overrides={"max_batch_size": 16})
    ranking = rank([result("m_config_default", point(50)), big, small], goals())
    assert ranking.winner is not None and ranking.winner.name == "small"


def test_what_windows_say_of_their_noise_decides_what_is_tied() -> None:
    noise = {"throughput": 0.05}
    rows = [result("m_config_default", point(190, noise=noise)), result("two", point(210, noise=noise), instances=2)]
    assert rank(rows, goals()).rows[0].tied
    rows = [result("m_config_default", point(190)), result("two", point(210), instances=2)]
    assert not rank(rows, goals()).rows[0].tied


def test_a_disturbed_point_does_not_win_in_silence() -> None:
    ranking = rank([DEFAULT, result("two", point(200, disturbed=True), instances=2)], goals())
    assert ranking.winner is not None and ranking.winner.name == "m_config_default"
    assert ranking.cautions == (
        "two may be better than m_config_default, but its measurement was disturbed: measure it again"
        " (--repeat-disturbed).",
    )


def test_where_all_was_disturbed_the_best_wins_without_a_caution() -> None:
    ranking = rank(
        [result("m_config_default", point(100, disturbed=True)), result("two", point(200, disturbed=True))], goals()
    )
    assert ranking.winner is not None and ranking.winner.name == "two"
    assert ranking.winner.point.disturbed and ranking.cautions == ()


def test_requests_that_fail_are_not_fast_ones() -> None:
    ranking = rank([DEFAULT, result("broken", point(900, failed=100), instances=2)], goals())
    assert ranking.winner is not None and ranking.winner.name == "m_config_default"
    assert not ranking.rows[1].satisfied


def test_without_a_measurement_there_is_no_ranking() -> None:
    ranking = rank([result("m_config_default", error="it did not start")], goals())
    assert (ranking.rows, ranking.winner) == ((), None)


def test_without_the_default_scores_are_beside_the_best_of_the_first() -> None:
    ranking = rank([result("m_config_default", error="too large"), result("one", point(100), instances=2)], goals())
    assert ranking.winner is not None and ranking.winner.score == 1.0
    assert ranking.default is None


def test_a_constraint_that_cannot_be_checked_is_not_kept() -> None:
    bound = Constraint("gpu_memory", maximum=10**9)
    ranking = rank([DEFAULT], goals(WeightedObjective("throughput"), constraints=[bound]))
    assert ranking.winner is None
    assert "GPU memory is not known" in str(ranking.rows[0].violations[0])


def test_the_noise_that_counts_is_that_of_what_is_wanted() -> None:
    fast = [
        result("m_config_default", point(p99=0.030, noise={"latency_p99": 0.05, "throughput": 0.001})),
        result("two", point(p99=0.027, noise={"latency_p99": 0.05, "throughput": 0.001}), instances=2),
    ]
    assert rank(fast, goals(WeightedObjective("latency_p99"))).rows[0].tied
    assert not rank(fast, goals(WeightedObjective("latency_p50"))).rows[0].tied


def test_without_what_is_wanted_of_it_nothing_wins() -> None:
    elsewhere = [
        result("m_config_default", replace(point(100), resources=None)),
        result("two", replace(point(900), resources=None), instances=2),
    ]
    for objective, label in (("memory", "memory"), ("gpu_power", "GPU power"), ("cost", "cost")):
        ranking = rank(elsewhere, goals(WeightedObjective("throughput"), WeightedObjective(objective)))
        assert ranking.winner is None
        assert f"{label} is not known" in str(ranking.rows[0].violations[0])


def test_a_winner_that_was_measured_for_other_goals_is_said_to_be() -> None:
    ranking = rank([DEFAULT, result("two", point(200, stopped=True), instances=2)], goals())
    assert ranking.winner is not None and ranking.winner.name == "two"
    assert "The measurement of two ended early" in ranking.cautions[0]
