"""When a measurement is ended before its time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from conch.machine.processes import Interference
from conch.measure.analyze.profiling.measurement import WindowsSoFar, share_of_error
from conch.measure.analyze.results import Point
from conch.measure.perf.figures import WindowFigures, mean_interval, student

QUIET, BUSY = Interference(), Interference(others=0.9)


def window(throughput: float, interference: Interference | None = None) -> WindowFigures:
    return WindowFigures(1.0, 100, throughput, {}, None, None, None, None, None, interference)


def slow(points: Sequence[Point]) -> bool:
    return all(point.throughput < 50 for point in points)


def test_a_window_that_others_disturbed_ends_nothing() -> None:
    windows = WindowsSoFar(8, {"m": None}, slow)
    observe = windows.observer("m")

    assert not observe(window(10, BUSY))
    assert not windows.stopped
    assert observe(window(10, QUIET))
    assert windows.stopped


def test_models_are_judged_together() -> None:
    windows = WindowsSoFar(8, {"a": None, "b": None}, slow)

    assert not windows.observer("a")(window(10))
    assert windows.observer("b")(window(10))
    assert windows.observer("a")(window(10)), "the other one ends, too"


def test_the_error_of_very_different_windows_is_not_cut() -> None:
    values = [1.0, 10.0, 250.0]
    interval, mean = mean_interval(values), sum(values) / 3
    assert interval is not None and interval.low == 0.0
    deviation = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert share_of_error(interval, mean, 3) == pytest.approx(deviation / 3**0.5 / mean)
    close = mean_interval([90.0, 100.0, 110.0])
    assert close is not None
    assert share_of_error(close, 100.0, 3) == pytest.approx((close.high - 100.0) / 100.0 / student(2))
