"""Comparisons of outputs: rounding in INT8 is told from the output of another text."""

from __future__ import annotations

import numpy as np

from conch.backends.base.verification import difference, rounding


def test_rounding_errors_of_int8_are_judged_together() -> None:
    draw = np.random.default_rng(0)
    output, other = draw.standard_normal((2, 30_000)).astype(np.float32)
    rounded = output + np.float32(0.1) * draw.standard_normal(30_000).astype(np.float32)
    rounded[7] += 0.3 * np.abs(output).max()

    assert difference(output, rounded, "int8") < rounding("int8") < difference(output, other, "int8")
    assert difference(output, rounded, "fp16") > rounding("fp16")


def test_a_number_that_is_not_finite_differs_in_every_precision() -> None:
    output = np.ones(4, np.float32)
    for value in (np.nan, np.inf):
        broken = np.array([1, 1, 1, value], np.float32)
        for precision in ("fp32", "int8"):
            assert difference(output, broken, precision) == float("inf")
    assert difference(output, np.ones(4, np.float32), "int8") == 0
