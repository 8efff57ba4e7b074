from __future__ import annotations

import random

import pytest

from conch.backends.batching.step_budget import StepBudget


def _seconds(rows: int, tokens: int, chance: random.Random) -> float:
    """Return the duration of a step on a machine that takes 8 ms, 1 ms per sequence and 0.5 ms per prompt token."""
    return (0.008 + 0.001 * rows + 0.0005 * tokens) * chance.uniform(0.95, 1.05) if rows or tokens else 0.0


def test_step_without_decoding_sequences_reads_up_to_the_limit() -> None:
    assert StepBudget(512).tokens(0) == 512


def test_first_step_beside_decoding_sequences_reads_nothing_to_learn_its_duration() -> None:
    budget = StepBudget(512)
    budget.measure(0, 100, 0.05)
    assert budget.tokens(4) == 0
    budget.measure(4, 0, 0.012)
    assert budget.tokens(4) > 0


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_steps_take_two_and_a_half_times_as_long_as_steps_that_only_decode(rows: int) -> None:
    chance = random.Random(rows)
    budget = StepBudget(512)
    plain = 0.008 + 0.001 * rows
    budget.measure(0, 300, _seconds(0, 300, chance))
    durations = []
    for _ in range(200):
        tokens = budget.tokens(rows)
        seconds = _seconds(rows, tokens, chance)
        budget.measure(rows, tokens, seconds)
        if tokens:
            durations.append(seconds / plain)
    late = durations[50:]
    assert 2.2 < sum(late) / len(late) < 2.6
    assert max(late) < 3


def test_prompts_progress_beside_decoding_sequences_however_slow_their_tokens_are() -> None:
    budget = StepBudget(512)
    budget.measure(0, 100, 100.0)
    budget.measure(1, 0, 0.01)
    assert budget.tokens(1) == 16


def test_limit_of_the_model_is_never_exceeded() -> None:
    budget = StepBudget(10)
    budget.measure(0, 10, 0.00001)
    budget.measure(8, 0, 0.1)
    assert (budget.tokens(0), budget.tokens(8)) == (10, 10)


def test_more_than_twice_as_many_sequences_are_measured_anew() -> None:
    budget = StepBudget(512)
    budget.measure(4, 0, 0.01)
    assert budget.tokens(8) > 0
    assert budget.tokens(9) == 0


def test_decoding_is_measured_anew_now_and_then() -> None:
    budget = StepBudget(512)
    budget.measure(4, 0, 0.01)
    for _ in range(64):
        assert budget.tokens(4) > 0
        budget.measure(4, 30, 0.025)
    assert budget.tokens(4) == 0


def test_one_slow_step_has_little_effect() -> None:
    budget = StepBudget(512)
    budget.measure(0, 100, 0.05)
    budget.measure(4, 0, 0.01)
    before = budget.tokens(4)
    budget.measure(4, 0, 10.0)
    assert budget.tokens(4) <= before * 1.3
