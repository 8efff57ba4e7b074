"""Which loads a candidate is measured at when all are asked for: as model analyzer does it.

Pure.  Loads double from the least until throughput grows no longer, or the constraints are violated; then, where there
are constraints, a binary search between the last load that kept them and the first that did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Throughput that grows by less than this share from one load to the next does not grow: noise is about as large.
GROWTH: Final = 0.05
#: So many loads in a row without growth end the climb; one may be an accident.
FLAT: Final = 2


class LoadClimb:
    """The loads of one candidate.  ``given`` are the user's: they are all measured, and nothing is searched."""

    def __init__(self, least: float, most: float, steps: int, given: Sequence[float] = ()) -> None:
        """``steps`` bounds the binary search."""
        self._least, self._most, self._steps = least, most, steps
        self._given = tuple(given)
        self._measured: dict[float, tuple[float, bool]] = {}

    def next(self) -> float | None:
        """The next load; None when no more is needed."""
        if self._given:
            return next((load for load in self._given if load not in self._measured), None)
        if not self._measured:
            return self._least
        climbed = self._climb()
        return climbed if climbed is not None else self._bisect()

    def add(self, load: float, throughput: float, satisfied: bool) -> None:
        """Learn what a load gave: inferences a second, and whether the constraints are kept."""
        self._measured[load] = (throughput, satisfied)

    def _climb(self) -> float | None:
        """Twice the highest load, while it is worth it."""
        doubled = [self._least]
        while doubled[-1] in self._measured:
            doubled.append(min(doubled[-1] * 2, self._most))
            if doubled[-1] == doubled[-2]:
                return None
        done = doubled[:-1]
        rates = [self._measured[load][0] for load in done]
        if not self._measured[done[-1]][1] and any(self._measured[load][1] for load in done):
            return None  # more load does not make latency better
        best_before = max(rates[:-FLAT], default=0.0)
        if len(rates) > FLAT and all(rate < best_before * (1 + GROWTH) for rate in rates[-FLAT:]):
            return None
        return doubled[-1]

    def _bisect(self) -> float | None:
        kept = [load for load, (_, satisfied) in self._measured.items() if satisfied]
        broken = [load for load, (_, satisfied) in self._measured.items() if not satisfied]
        if not kept or not broken or self._steps <= 0:
            return None
        above = [load for load in broken if load > max(kept)]
        if not above:
            return None
        middle = float(int((max(kept) + min(above)) / 2))
        if middle in self._measured or middle <= max(kept):
            return None
        self._steps -= 1
        return middle
