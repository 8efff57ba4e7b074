"""The loads of a candidate in a full sweep, as in model analyzer.

Pure. The load doubles from the lowest until throughput stops growing, or the constraints are violated. With
constraints, a binary search follows between the last load that satisfied them and the first that did not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from conch.measure.analyze.search.axis import LoadAxis

#: Growth of throughput below this fraction counts as none: noise is about as large.
GROWTH: Final = 0.05
#: Number of successive loads without growth that end the climb; a single one may be an accident.
FLAT: Final = 2


class LoadClimb:
    """The loads of one candidate; if the user gave loads, only those are used."""

    def __init__(self, axis: LoadAxis, steps: int, *, early_exit: bool = False) -> None:
        """Start the climb.

        ``steps`` limits the binary search; ``early_exit`` ends given loads like automatic ones.
        """
        self._axis, self._steps = axis, steps
        self._all = bool(axis.given) and not early_exit
        self._rising = list(axis.given) or list(_doubled(axis.least, axis.most))
        self._throughput: dict[float, float] = {}
        self._kept: dict[float, bool] = {}

    def next(self) -> float | None:
        """Return the next load; None at the end."""
        done = [load for load in self._rising if load in self._throughput]
        if len(done) < len(self._rising) and (self._all or not self._over(done)):
            return self._rising[len(done)]
        return None if self._axis.given else self._between()

    def add(self, load: float, throughput: float, kept: bool) -> None:
        """Record the throughput at a load (inferences per second), and whether the constraints are satisfied."""
        self._throughput[load] = throughput
        self._kept[load] = kept

    def _over(self, done: list[float]) -> bool:
        """Return whether a higher load gives no more throughput, or has violated the constraints."""
        if done and not self._kept[done[-1]] and any(self._kept[load] for load in done):
            return True
        rates = [self._throughput[load] for load in done]
        before, last = rates[:-FLAT], rates[-FLAT:]
        return bool(before) and all(rate < max(before) * (1 + GROWTH) for rate in last)

    def _between(self) -> float | None:
        """Return the middle between the highest load that satisfied the constraints and the next one that did not."""
        highest = max((load for load, kept in self._kept.items() if kept), default=None)
        above = [load for load, kept in self._kept.items() if not kept and highest is not None and load > highest]
        if highest is None or not above or self._steps <= 0:
            return None
        middle = (highest + min(above)) / 2
        middle = middle if self._axis.rates else float(int(middle))
        if middle in self._kept:
            return None
        self._steps -= 1
        return middle


def _doubled(least: float, most: float) -> Iterator[float]:
    load = least
    while load < most:
        yield load
        load *= 2
    yield most
