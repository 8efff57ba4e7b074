"""The best configuration beside the default, measured in turns."""

from __future__ import annotations

import pytest

from conch.analyze.judging.goals import WeightedObjective
from conch.analyze.judging.ranking import Ranked
from conch.analyze.judging.turns import FinalTurns, TurnPair, TurnsResult, turns_result
from tests.unit.analyze.points import goals, point
from tests.unit.analyze.points import result as candidate


def turns(*throughputs: tuple[float, float], disturbed: int = 0) -> FinalTurns:
    """Pairs of the default's throughput and the best one's, the first ones disturbed."""
    return FinalTurns("m_config_1", [
        TurnPair(point(default), point(best, disturbed=number < disturbed))
        for number, (default, best) in enumerate(throughputs)
    ])  # fmt: skip


def ranked(name: str = "m_config_1", load: float = 8) -> Ranked:
    best = point(load=load)
    return Ranked(1, candidate(name, best), best, 1.0)


def result(of: FinalTurns | None, winner: str = "m_config_1", load: float = 8) -> TurnsResult | None:
    return turns_result(of, ranked(winner, load), goals())


def test_the_ratio_is_that_of_points_taken_together_however_the_machine_drifts() -> None:
    found = result(turns((100, 201), (50, 100), (80, 159)))
    assert found is not None and found.interval is not None
    assert found.ratio == pytest.approx(2.0, rel=0.01) and found.certain
    assert 1.95 < found.interval.low < 2.0 < found.interval.high < 2.05


def test_a_difference_within_the_noise_is_none() -> None:
    found = result(turns((100, 120), (100, 90), (100, 105)))
    assert found is not None and not found.certain


def test_a_single_pair_is_not_certain() -> None:
    found = result(turns((100, 300)))
    assert found is not None and found.interval is None and not found.certain


def test_disturbed_pairs_count_where_there_are_too_few_others() -> None:
    quiet = result(turns((100, 500), (100, 200), (100, 202), disturbed=1))
    assert quiet is not None and quiet.ratio == pytest.approx(2.0, rel=0.01) and not quiet.disturbed
    disturbed = result(turns((100, 210), (100, 200), (100, 202), disturbed=2))
    assert disturbed is not None and disturbed.disturbed


def test_what_is_compared_is_what_is_wanted() -> None:
    pair = TurnPair(point(100, p99=0.2), point(50, p99=0.1))
    found = turns_result(FinalTurns("m_config_1", [pair, pair]), ranked(), goals(WeightedObjective("latency_p99")))
    assert found is not None and found.ratio == pytest.approx(2.0)


def test_turns_without_answers_say_nothing() -> None:
    assert result(FinalTurns("m_config_1", [])) is None
    assert result(None) is None
    assert result(turns((100, 0))) is None


def test_turns_of_another_candidate_or_load_say_nothing() -> None:
    taken = turns((100, 200), (100, 200))
    assert result(taken) is not None
    assert result(taken, winner="m_config_2") is result(taken, load=16) is None


def test_a_default_that_is_better_in_turns_is_told() -> None:
    found = result(turns((100, 80), (101, 80), (99, 80)))
    assert found is not None and found.worse and not found.certain
