"""Figures read well: three of them, in a unit that fits."""

from __future__ import annotations

from math import inf

import pytest

from conch.measure.reports.numbers import bytes_of, duration, megabytes, milliseconds, percent, significant, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (20.0993, "20.1"), (71.944, "71.9"), (1412.581, "1,413"), (0.012345, "0.0123"), (0, "0"), (9.996, "10.0"),
        (99.96, "100"), (-3.14159, "-3.14"), (12480.4, "12,480"), (None, "–"), (inf, "–"),
    ],
)  # fmt: skip
def test_a_figure_has_three_significant_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (216e-6, "216 µs"), (0.9996e-3, "1.00 ms"), (0.046783, "46.8 ms"), (1.412581, "1.41 s"), (0, "0 s"),
        (720, "12 min"), (9000, "2.50 h"), (None, "–"),
    ],
)  # fmt: skip
def test_a_time_in_a_sentence_has_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_time_in_a_column_is_in_milliseconds() -> None:
    assert [milliseconds(0.000216), milliseconds(1.412581), milliseconds(None)] == ["0.216", "1,413", "–"]


def test_sizes_are_in_units_of_a_thousand() -> None:
    assert [bytes_of(46_226_472_960), bytes_of(90_900_000), bytes_of(12)] == ["46.2 GB", "90.9 MB", "12 bytes"]
    assert megabytes(46_226_472_960) == "46,226"


def test_shares_and_ratios_are_in_words() -> None:
    assert [percent(0.283), percent(0.0283), percent(0)] == ["28 %", "2.8 %", "0 %"]
    assert [times(2.71), times(1.125), times(0.92)] == ["2.7 times", "12 % more", "8 % less"]
