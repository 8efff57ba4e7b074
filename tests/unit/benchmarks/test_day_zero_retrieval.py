"""A result differs from its reference if a number, its shape or the number of results does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.day_zero.retrieval import LENGTHS, TEXTS, difference

WANTED = np.array([0.0, 2.0, -4.0], np.float32)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([WANTED + 3e-5], ""),
        ([WANTED + 6e-5], "text 0 differs by 6.0e-05 of 4.0e+00"),
        ([WANTED * np.nan], "text 0 differs by nan of 4.0e+00"),
        ([WANTED[:2]], "text 0 has the shape (2,), not (3,)"),
        ([{1: 2.0, 2: -4.0}], ""),
        ([{1: 2.0}], "text 0 differs by 4.0e+00 of 4.0e+00"),
        ([], "0 results, not 1"),
    ],
)
def test_difference(found: list[Any], problem: str) -> None:
    assert difference(found, [WANTED]) == problem


def test_texts_have_different_lengths() -> None:
    assert [len(text.split()) for text in TEXTS] == list(LENGTHS)
    assert len(set(LENGTHS)) == 16
