"""Figures and verdict of language models, from made-up observations."""

from __future__ import annotations

import numpy as np
import pytest

from conch.convert.causal.agreement import Predictions, compare, reasons, shared_prefix


def predictions(logprobs: list[float], likeliest: list[int], *continuations: list[int]) -> Predictions:
    return Predictions([np.array(logprobs)], [np.array(likeliest)], continuations)


REFERENCE = predictions([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9])


def test_the_reference_agrees_with_itself() -> None:
    figures = compare(REFERENCE, REFERENCE)

    assert figures.perplexity.value == figures.perplexity.reference == pytest.approx(np.exp(2))
    assert figures.perplexity.delta == 0
    assert figures.top_1 == figures.greedy.prefix == figures.greedy.identical == 1
    assert reasons("fp32", figures) == ()


def test_perplexity_next_tokens_and_continuations_are_compared() -> None:
    figures = compare(REFERENCE, predictions([-1.1, -2.1, -3.1, -2.1], [1, 2, 3, 0], [5, 6, 0, 8], [9, 9, 9, 9]))

    assert figures.perplexity.delta == pytest.approx(np.expm1(0.1))
    assert figures.perplexity.low == pytest.approx(figures.perplexity.high)
    assert figures.top_1 == 0.75
    assert figures.greedy.mean_tokens == 3
    assert figures.greedy.prefix == 0.75
    assert figures.greedy.identical == 0.5


def test_a_refusal_names_each_bound_that_is_missed() -> None:
    figures = compare(REFERENCE, predictions([-1.5, -2.5, -3.5, -2.5], [0, 0, 0, 4], [0], [9, 9, 0, 0]))

    perplexity, next_token, greedy = reasons("int8", figures)
    assert perplexity == "perplexity 12.18 is 64.87% higher than the reference's 7.39, more than 3.00%"
    assert "the same at 25.0% of positions, below 92%" in next_token
    assert "25.0% of the greedy continuations is the same, below 30%" in greedy


@pytest.mark.parametrize("value", [float("nan"), -np.inf])
def test_log_probabilities_must_be_finite(value: float) -> None:
    figures = compare(REFERENCE, predictions([-1.0, value, -3.0, -2.0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]))

    assert reasons("int4-awq", figures) == ("its log-probabilities are not finite",)


def test_a_perplexity_that_is_much_lower_is_a_fault_too() -> None:
    figures = compare(REFERENCE, predictions([-0.5, -1.5, -2.5, -1.5], [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]))

    assert "lower" in reasons("int4", figures)[0]


def test_what_two_continuations_share_ends_at_the_first_difference() -> None:
    assert shared_prefix([1, 2, 3], [1, 0, 3]) == 1
    assert shared_prefix([1, 2], [1, 2, 3]) == 2
    assert shared_prefix([], [1]) == 0
