"""When a measurement is ended before its time."""

from __future__ import annotations

from collections.abc import Sequence

from conch.analyze.profiling.measurement import WindowsSoFar
from conch.analyze.results import Point
from conch.machine.bystanders import Interference
from conch.perf.figures.latency import WindowFigures

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
