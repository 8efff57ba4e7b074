"""Histograms and summaries of durations."""

from __future__ import annotations

from math import isnan

from conch.telemetry.statistics import SUMMARY_OBSERVATIONS, SUMMARY_SECONDS, Histogram, Summary


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_observation_on_a_bound_is_within_it() -> None:
    histogram = Histogram([100, 500])
    for value in (99, 100, 101, 501):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 3, 4]
    assert (histogram.count, histogram.sum) == (4, 801)


def test_quantiles_are_nearest_ranks() -> None:
    summary = Summary()
    for value in range(100, 0, -1):
        summary.observe(value)
    assert summary.quantiles([0, 0.5, 0.9, 0.99, 1]) == [1, 50, 90, 99, 100]


def test_quantiles_of_nothing_are_not_numbers() -> None:
    assert all(map(isnan, Summary().quantiles([0.5, 0.9])))


def test_old_observations_leave_the_quantiles_but_not_the_sum() -> None:
    clock = Clock()
    summary = Summary(clock)
    summary.observe(1000)
    clock.now += SUMMARY_SECONDS + 1
    summary.observe(10)
    assert summary.quantiles([1]) == [10]
    assert (summary.count, summary.sum) == (2, 1010)


def test_memory_of_a_summary_is_bounded() -> None:
    summary = Summary(Clock())
    summary.observe(1_000_000)
    for _ in range(SUMMARY_OBSERVATIONS):
        summary.observe(1)
    assert summary.quantiles([1]) == [1]
    assert summary.count == SUMMARY_OBSERVATIONS + 1
