"""The time left of an analysis, by a clock of its own."""

from __future__ import annotations

from conch.measure.analyze.profiling.progress import Pace, SearchProgress


def test_the_time_left_follows_from_the_measurements_so_far() -> None:
    pace = Pace(now=100.0, guess=9.0)
    assert pace.progress(expected=4) == SearchProgress(0, 4, 36.0)
    pace.add(110.0)
    pace.add(130.0)
    assert pace.progress(expected=4) == SearchProgress(2, 4, 30.0)


def test_points_from_the_journal_take_no_time() -> None:
    pace = Pace(now=0.0, guess=9.0)
    for _ in range(8):
        pace.add(1.0, measured=False)
    pace.add(11.0)
    assert pace.progress(expected=10) == SearchProgress(9, 10, 10.0)


def test_more_than_expected_is_the_end() -> None:
    pace = Pace(now=0.0, guess=9.0)
    pace.add(5.0)
    pace.add(10.0)
    assert pace.progress(expected=1) == SearchProgress(2, 2, 0.0)
