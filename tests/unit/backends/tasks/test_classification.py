"""The sentences of zero-shot classification: what is multiplied there is limited first."""

from __future__ import annotations

import pytest

from conch.backends.tasks.classification import check_labels, hypotheses, max_labels
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError


def test_braces_beside_the_place_are_text() -> None:
    assert hypotheses("a {} of {x}", ["bus"], []) == ["a bus of {x}"]


@pytest.mark.parametrize("template", ["{:>300000000}", "no place", "{} and {}", "{0.__class__}", "", "{}" + "x" * 999])
def test_template_without_its_one_placeholder_or_too_long_is_refused(template: str) -> None:
    with pytest.raises(ConchError, match="must have one placeholder for the label") as refused:
        hypotheses(template, ["bus"], [])
    assert refused.value.code is Code.INVALID_ARG
    assert len(refused.value.message) < 300


def test_text_that_every_label_would_get_is_refused_before_it_is_multiplied() -> None:
    text = "x" * (1 << 20)
    with pytest.raises(ConchError, match=r"65 candidate labels with their texts are .* characters"):
        hypotheses("{}", ["a"] * 65, [text] * 65)


def test_labels_are_limited() -> None:
    check_labels(1000, max_labels(Options()))
    with pytest.raises(ConchError, match="has 1001 labels in a row; at most 1000"):
        check_labels(1001, max_labels(Options()))
    with pytest.raises(ConchError, match="parameter 'max_candidate_labels' is 0"):
        max_labels(Options.from_values({"max_candidate_labels": 0}))
