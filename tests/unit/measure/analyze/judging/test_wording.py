"""Goals in words."""

from __future__ import annotations

from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals, WeightedObjective, in_words
from tests.unit.measure.analyze.points import goals


def test_goals_are_said_as_people_say_them() -> None:
    bounds = [Constraint("latency_p99", maximum=0.1), Constraint("memory", maximum=4e9)]
    assert in_words(goals(constraints=bounds)) == (
        "highest throughput with p99 latency at most 100 ms and memory at most 4,000 MB"
    )
    weighted = goals(WeightedObjective("latency_average", 2), WeightedObjective("gpu_memory"))
    assert in_words(weighted) == "lowest average latency (weight 2) and least GPU memory (weight 1)"


def test_models_with_goals_of_their_own_are_named() -> None:
    one, other = ModelGoals(), ModelGoals((WeightedObjective("cost"),))
    assert in_words(Goals({"a": one, "b": one})) == "highest throughput"
    assert in_words(Goals({"a": one, "b": other})) == "a: highest throughput; b: lowest cost"
