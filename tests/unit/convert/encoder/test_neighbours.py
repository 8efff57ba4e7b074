"""A row alone against the same row among others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from conch.backends.base.arrays import Array
from conch.convert.encoder.agreement import OutputAgreement, SampleOutputs
from conch.convert.encoder.conversion import missed_tolerances
from conch.convert.encoder.evaluate import Neighbours, TokenBatch, alone, neighbours

BATCH = TokenBatch((0, 1), {"input_ids": np.array([[5, 6, 0], [7, 8, 9]]),
                            "attention_mask": np.array([[1, 1, 0], [1, 1, 1]])})  # fmt: skip


def test_row_alone_has_no_padding() -> None:
    first, second = alone(BATCH)

    assert (first.indices, second.indices) == ((0,), (1,))
    assert first.arrays["input_ids"].tolist() == [[5, 6]]
    assert second.arrays["input_ids"].tolist() == [[7, 8, 9]]


def answering(kind: str, with_scale: bool):  # type: ignore[no-untyped-def]
    """A network whose answers depend on the greatest number in the batch, or not."""

    def answer(batches: Sequence[TokenBatch]) -> list[SampleOutputs]:
        outputs: list[SampleOutputs] = []
        for batch in batches:
            ids: Array = batch.arrays["input_ids"].astype(float)
            scale = ids.max() if with_scale else 1.0
            outputs += [{kind: np.array([[row[0], scale]]), "last_hidden_state": np.ones((1, 2))} for row in ids]
        return outputs

    return answer


def test_answers_that_do_not_depend_on_others_are_the_same() -> None:
    found = neighbours([BATCH], answering("embedding", False))

    assert found == Neighbours(pytest.approx(1), None, 0.0, 2, 2)


def test_scales_of_a_whole_batch_show() -> None:
    found = neighbours([BATCH], answering("embedding", True))

    # (5, 6) alone, (5, 9) beside a row with a 9.
    assert found.cosine_min == pytest.approx(79 / np.sqrt(61 * 106))
    assert found.max_difference == 3


def test_hidden_states_count_where_they_are_the_answer() -> None:
    def answer(batches: Sequence[TokenBatch]) -> list[SampleOutputs]:
        return [
            {"last_hidden_state": np.array([[1.0, len(batch.indices)]])} for batch in batches for _ in batch.indices
        ]

    assert neighbours([BATCH], answer).cosine_min == pytest.approx(3 / np.sqrt(10))


def test_labels_that_change_in_a_batch_are_counted() -> None:
    found = neighbours([BATCH], answering("logits", True))

    assert found.argmax == 1
    assert neighbours([TokenBatch((0,), {name: array[:1] for name, array in BATCH.arrays.items()})],
                      answering("logits", False)).argmax == 1  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "found", "expected"),
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
def test_dependence_beyond_the_tolerance_refuses(precision: str, found: Neighbours, expected: str | None) -> None:
    outputs = {"embedding": OutputAgreement(1, 1, 0, None, 384)}

    missed = missed_tolerances(precision, outputs, None, found)

    assert missed == () if expected is None else missed[0].startswith(expected)
