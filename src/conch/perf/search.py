"""Which levels of load are measured: one after the other, or by halves towards a limit of latency.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from conch.errors import invalid
from conch.perf.plan import Levels


class LevelSearch:
    """Levels in turn, each chosen once the one before was measured and noted; as perf_analyzer searches.

    ``limit`` (s, 0: none) ends a search from level to level.  A search by halves goes on until levels are closer than
    the step.
    """

    def __init__(self, levels: Levels, limit: float = 0.0, *, binary: bool = False) -> None:
        """Raises INVALID_ARG for a search that would not end."""
        if binary and not (limit and levels.last > levels.first):
            raise invalid(
                "--binary-search looks for the highest load below --latency-threshold from start to end: give both"
            )
        if not levels.last and not limit:
            raise invalid("a range whose end is 0 goes on until --latency-threshold is reached: give that")
        self._levels, self._limit, self._binary = levels, limit, binary
        self._within: bool | None = None

    def __iter__(self) -> Iterator[float]:
        return self._halves() if self._binary else self._steps()

    def note(self, latency: float | None) -> None:
        """The latency (s) at the level that came last; None where nothing was answered."""
        self._within = latency is not None and (not self._limit or latency <= self._limit)

    def _steps(self) -> Iterator[float]:
        for level in self._levels:
            yield level
            if self._limit and not self._within:
                return

    def _halves(self) -> Iterator[float]:
        low, high, step = self._levels.first, self._levels.last, self._levels.step
        for level in (low, high):
            yield level
            if bool(self._within) is (level == high):
                return
        while high - low > step:
            middle = low + max(1, round((high - low) / 2 / step)) * step
            if middle >= high:
                return
            yield middle
            if self._within:
                low = middle
            else:
                high = middle
