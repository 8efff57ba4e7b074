"""What the compared samples can tell."""

from __future__ import annotations

import numpy as np
import pytest

from conch.convert.evidence import (
    MIN_SAMPLES,
    chance,
    few_samples,
    few_tokens,
    ndcg,
    recall,
    same_label_warning,
    too_few,
    wilson,
)


def test_least_number_of_samples_bounds_twice_the_loss_of_int8() -> None:
    assert wilson(1, MIN_SAMPLES - 1)[0] < 0.9 <= wilson(1, MIN_SAMPLES)[0]


def test_precisions_below_fp32_need_samples() -> None:
    assert too_few("int8", 3, "samples", 35) == ("3 samples are too few to judge int8: at least 35 are needed",)
    assert too_few("int8", 35, "samples", 35) == too_few("fp32", 3, "samples", 35) == ()


def test_three_samples_are_warned_of_with_the_bound_that_they_give() -> None:
    (warning,) = few_samples(3, both=True)

    assert warning.startswith("only 3 samples are compared, and variants are calibrated on the samples")
    assert "may still be 0.44 (95 % interval)" in warning and "--data needs 53 texts" in warning
    assert "calibrated" not in few_samples(30, both=False)[0]
    assert few_samples(MIN_SAMPLES, both=False) == few_tokens(1000) == []
    assert "only 999 tokens" in few_tokens(999)[0]


@pytest.mark.parametrize("right", [50, 55])
def test_reference_that_does_no_better_than_the_most_frequent_label_is_called_chance(right: int) -> None:
    labels = [0] * 50 + [1] * 50
    answers = labels[:right] + [1 - label for label in labels[right:]]

    (warning,) = chance(labels, answers, ("bad", "good"))

    assert f"its accuracy is 0.{right}" in warning and "always answering 'bad' gives 0.50" in warning


def test_reference_that_knows_more_than_chance_is_not_warned_of() -> None:
    labels = [0, 1] * 30

    assert chance(labels, labels, ()) == []
    assert chance(labels, [*labels[:-10], *[0] * 10], ()) == []


def test_labels_that_are_all_the_same_tell_nothing() -> None:
    assert "always answering '1' gives 1.00" in chance([1] * 50, [1] * 50, ())[0]


def test_reference_with_one_answer_is_warned_of() -> None:
    same, other = np.array([1]), np.array([0])

    assert "answers 'good' to all 3 samples" in same_label_warning([same] * 3, ("bad", "good"))[0]
    assert same_label_warning([same, other], ("bad", "good")) == same_label_warning([same], ()) == []


def test_gains_are_ranks_among_the_best() -> None:
    reference = np.arange(100, 0, -1.0)
    swapped = reference.copy()
    swapped[[0, 99]] = swapped[[99, 0]]
    assert ndcg(reference, reference, 10) == 1
    assert ndcg(reference, swapped, 10) == pytest.approx(1 - 10 / sum((10 - n) / np.log2(n + 2) for n in range(10)))
    # Beyond the best ten, order does not count.
    assert ndcg(reference, np.where(reference > 90, reference, 0), 10) == 1


def test_recall_counts_the_best_of_both() -> None:
    reference = np.arange(8.0)
    assert recall(reference, reference * 2, 4) == 1
    assert recall(reference, np.array([9, 1, 2, 3, 4, 5, 6, 7]), 4) == 0.75
    assert recall(np.zeros(8), np.zeros(8), 4) == 1
