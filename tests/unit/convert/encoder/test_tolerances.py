"""What is refused, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from conch.convert.encoder.agreement import OutputAgreement, TaskAgreement
from conch.convert.encoder.conversion import TOLERANCES, missed_tolerances, together
from conch.convert.encoder.evaluate import Neighbours

GOOD = OutputAgreement(cosine_min=0.99999, cosine_mean=1.0, max_difference=1e-5, argmax=None, width=384)
TASK = TaskAgreement("same label", 1.0, 0.0, -0.04, 0.0, 99)


def test_variant_within_its_tolerance_passes() -> None:
    assert missed_tolerances("fp32", {"last_hidden_state": GOOD}, TASK) == ()


def test_refusal_names_the_figure_the_output_and_the_bound() -> None:
    worse = replace(GOOD, cosine_min=0.93)

    assert missed_tolerances("int8", {"embedding": worse}, TASK) == ("cosine_min 0.93 of embedding is below 0.97",)


def test_every_miss_is_a_reason() -> None:
    worse = replace(GOOD, cosine_min=0.1, cosine_mean=0.2, argmax=0.3)

    assert len(missed_tolerances("int8", {"logits": worse, "embedding": worse}, replace(TASK, delta=-0.5))) == 7


def test_lower_precision_is_granted_more() -> None:
    worse = replace(GOOD, cosine_min=0.98, cosine_mean=0.98)

    assert missed_tolerances("fp32", {"embedding": worse}, TASK)
    assert missed_tolerances("bf16", {"embedding": worse}, TASK)
    assert not missed_tolerances("int8", {"embedding": worse}, TASK)
    assert not missed_tolerances("int8-static", {"embedding": worse}, TASK)


def test_few_classes_are_judged_by_which_wins() -> None:
    near_the_border = OutputAgreement(cosine_min=-1.0, cosine_mean=0.99, max_difference=0.1, argmax=0.99, width=2)

    assert missed_tolerances("int8", {"logits": near_the_border}, TASK) == ()
    assert missed_tolerances("int8", {"logits": replace(near_the_border, width=30_522)}, TASK)
    assert missed_tolerances("int8", {"logits": replace(near_the_border, argmax=0.9)}, TASK) == (
        "argmax agreement 0.9 of logits is below 0.95",
    )


@pytest.mark.parametrize("delta", [-0.06, float("nan")])
def test_loss_of_the_tasks_metric_is_a_reason(delta: float) -> None:
    (reason,) = missed_tolerances("int8", {}, replace(TASK, value=1 + delta, delta=delta))

    assert reason.startswith("same label")
    assert "more than 0.05" in reason


def test_gain_is_no_reason() -> None:
    assert missed_tolerances("int8", {}, replace(TASK, delta=0.5)) == ()


def test_values_that_are_not_finite_are_refused() -> None:
    broken = OutputAgreement(float("nan"), float("nan"), float("inf"), 0.0, 384)

    assert missed_tolerances("int8", {"embedding": broken}, None) == ("embedding has values that are not finite",)


def test_bounds_loosen_from_row_to_row() -> None:
    rows = list(TOLERANCES.values())

    for tight, loose in pairwise(rows):
        assert tight.vector >= loose.vector and tight.mean >= loose.mean and tight.task <= loose.task


@pytest.mark.parametrize("width", [1, 3])
def test_scores_and_few_classes_of_two_variants_are_as_close_as_the_stricter_precision_says(width: int) -> None:
    """Nothing else bounds them: a cosine says nothing of them, and the same label can win by more or less."""
    scores = {"logits": OutputAgreement(None, None, 0.05, None if width == 1 else 1.0, width)}
    found = Neighbours(None, None if width == 1 else 1.0, 0.05, rows=6, samples=24)

    assert together(("int8", "int8"), scores, found, 5.0) == ()
    assert together(("fp32", "int8"), scores, found, 5.0) == (
        "answers differ by up to 0.05, which is more than 0.001 of the largest, 5",
    )
    assert together(("fp32", "fp32"), scores, replace(found, max_difference=1e-5), 5.0) == ()
    assert together(("int8", "int8"), scores, replace(found, max_difference=float("nan")), 5.0)


def test_vectors_of_two_variants_are_as_close_as_the_stricter_precision_says() -> None:
    vectors = {"embedding": OutputAgreement(0.995, 0.999, 0.2, None, 384)}
    found = Neighbours(0.995, None, 0.2, rows=6, samples=24)

    assert together(("int8", "int8"), vectors, found, 1.0) == ()
    (reason,) = together(("int8", "fp32"), vectors, found, 1.0)
    assert reason.startswith("cosine 0.995 of a row alone") and reason.endswith("is below 0.9999")
