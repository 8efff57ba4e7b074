"""Which loads a candidate is measured at when all are asked for: as model analyzer does it.

Pure.  Loads double from the least until throughput grows no longer, or the constraints are violated; then, where there
are constraints, a binary search between the last load that kept them and the first that did not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from conch.analyze.search.axis import LoadAxis

#: Throughput that grows by less than this share does not grow: noise is about as large.
GROWTH: Final = 0.05
#: So many loads in a row without growth end the climb; one may be an accident.
FLAT: Final = 2


class LoadClimb:
    """The loads of one candidate.  Where the user gave loads, there are no others."""

    def __init__(self, axis: LoadAxis, steps: int, *, early_exit: bool = False) -> None:
        """``steps`` bounds the binary search; ``early_exit`` lets loads that the user gave end as others do."""
        self._axis, self._steps = axis, steps
        self._all = bool(axis.given) and not early_exit
        self._rising = list(axis.given) or list(_doubled(axis.least, axis.most))
        self._throughput: dict[float, float] = {}
        self._kept: dict[float, bool] = {}

    def next(self) -> float | None:
        """The next load; None when no more is needed."""
        done = [load for load in self._rising if load in self._throughput]
        if len(done) < len(self._rising) and (self._all or not self._over(done)):
            return self._rising[len(done)]
        return None if self._axis.given else self._between()

    def add(self, load: float, throughput: float, kept: bool) -> None:
        """Learn what a load gave: inferences a second, and whether the constraints are kept."""
        self._throughput[load] = throughput
        self._kept[load] = kept

    def _over(self, done: list[float]) -> bool:
        """Whether more load gives no more throughput, or has broken the constraints."""
        if done and not self._kept[done[-1]] and any(self._kept[load] for load in done):
            return True
        rates = [self._throughput[load] for load in done]
        before, last = rates[:-FLAT], rates[-FLAT:]
        return bool(before) and all(rate < max(before) * (1 + GROWTH) for rate in last)

    def _between(self) -> float | None:
        """The middle between the highest load that kept the constraints and the next that did not."""
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
