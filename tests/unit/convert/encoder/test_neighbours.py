"""A row alone against the same row among others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from conch.convert.encoder.agreement import OutputAgreement, SampleOutputs
from conch.convert.encoder.conversion import missed_tolerances
from conch.convert.encoder.evaluate import Neighbours, run_samples

#: The first number of each of two samples, and its largest.
SAMPLES = ((5, 4), (7, 9))


def running(kind: str, with_scale: bool):  # type: ignore[no-untyped-def]
    """A network whose outputs depend on the largest number in the batch, or not."""

    def run(indices: Sequence[int]) -> list[SampleOutputs]:
        scale = max(SAMPLES[index][1] for index in indices) if with_scale else 1.0
        return [
            {kind: np.array([[SAMPLES[index][0], scale]]), "last_hidden_state": np.ones((1, 2))} for index in indices
        ]

    return run


def test_outputs_are_in_the_order_of_the_samples_of_any_length() -> None:
    samples = run_samples([3, 2], running("embedding", False))

    assert [sample["embedding"].tolist() for sample in samples.outputs] == [[[5, 1]], [[7, 1]]]


def test_outputs_that_do_not_depend_on_others_are_the_same() -> None:
    samples = run_samples([2, 3], running("embedding", False))

    assert samples.neighbours == Neighbours(pytest.approx(1), None, 0.0, 2, 2)


def test_scales_of_a_whole_batch_show() -> None:
    result = run_samples([2, 3], running("embedding", True)).neighbours

    # (5, 4) alone, (5, 9) beside a row with a 9.
    assert result.cosine_min == pytest.approx(61 / np.sqrt(41 * 106))
    assert result.max_difference == 5


def test_hidden_states_count_where_they_are_the_output() -> None:
    def run(indices: Sequence[int]) -> list[SampleOutputs]:
        return [{"last_hidden_state": np.array([[1.0, len(indices)]])} for _ in indices]

    assert run_samples([2, 3], run).neighbours.cosine_min == pytest.approx(3 / np.sqrt(10))


def test_labels_that_change_in_a_batch_are_counted() -> None:
    assert run_samples([2, 3], running("logits", True)).neighbours.argmax == 0.5
    assert run_samples([2, 3], running("logits", False)).neighbours.argmax == 1


@pytest.mark.parametrize(
    ("precision", "result", "expected"),
    [
        (
            "int8",
            Neighbours(0.969, None, 0.1, 6, 24),
            "cosine 0.969 of a row alone with the same row in a batch is below",
        ),
        (
            "fp32",
            Neighbours(0.999, None, 0.1, 6, 24),
            "cosine 0.999 of a row alone with the same row in a batch is below",
        ),
        ("int8", Neighbours(None, 0.9, 0.1, 6, 24), "0.9 of the answers are the same alone and in a batch, below 0.95"),
        ("int8", Neighbours(0.98, None, 0.1, 6, 24), None),
    ],
)
def test_dependence_beyond_the_tolerance_refuses(precision: str, result: Neighbours, expected: str | None) -> None:
    outputs = {"embedding": OutputAgreement(1, 1, 0, None, 384)}

    missed = missed_tolerances(precision, outputs, None, result)

    assert missed == () if expected is None else missed[0].startswith(expected)
