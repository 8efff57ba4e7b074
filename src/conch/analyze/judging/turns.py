"""The best configuration beside the default, measured in turns: how many times as good it is, and how sure that is.

Pure.  Points of a search are minutes apart, in which a shared machine becomes faster or slower; two that were measured
one after the other were measured on the same machine.  Their ratio is what may be promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import score
from conch.analyze.judging.ranking import Ranked
from conch.analyze.results import Point
from conch.perf.figures.confidence import Interval, ratio_interval

#: Undisturbed pairs that are enough; with fewer, the disturbed ones count as well.
ENOUGH: Final = 2


@dataclass(frozen=True, slots=True)
class TurnPair:
    """The default and the best configuration, each at its best load, one right after the other."""

    default: Point
    best: Point

    @property
    def disturbed(self) -> bool:
        """Whether others used the machine meanwhile."""
        return self.default.disturbed or self.best.disturbed


@dataclass(frozen=True, slots=True)
class FinalTurns:
    """The pairs of the candidate ``name``, which was the best when the search had ended."""

    name: str
    pairs: Sequence[TurnPair]


@dataclass(frozen=True, slots=True)
class TurnsResult:
    """How many times as good as the default the best one is: the mean over the pairs, and its 95 % interval (None for
    a single pair).  ``disturbed`` says that pairs count in which others used the machine."""

    ratio: float
    interval: Interval | None
    disturbed: bool

    @property
    def certain(self) -> bool:
        """Whether it is better by more than the noise."""
        return self.interval is not None and self.interval.low > 1.0

    @property
    def worse(self) -> bool:
        """Whether the default is better by more than the noise."""
        return self.interval is not None and self.interval.high < 1.0


def turns_result(turns: FinalTurns | None, winner: Ranked | None, goals: Goals) -> TurnsResult | None:
    """What the turns say of ``winner`` under ``goals``.

    None where they were another candidate's, or at another load, or where no pair has answers on both sides.
    """
    if turns is None or winner is None or turns.name != winner.name:
        return None
    if any(one.best.load != winner.point.load for one in turns.pairs):
        return None
    quiet = [one for one in turns.pairs if not one.disturbed]
    counted = quiet if len(quiet) >= ENOUGH else turns.pairs
    ratios = [ratio for one in counted if (ratio := score(one.best, one.default, goals)) not in (0.0, float("inf"))]
    if not ratios:
        return None
    ratio, interval = ratio_interval(ratios)
    return TurnsResult(ratio, interval, any(one.disturbed for one in counted))
