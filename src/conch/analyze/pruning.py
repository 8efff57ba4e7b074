"""When a measurement may end early: its point cannot win any more.

Pure.  Asked after every window of a measurement that has a rival.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.analyze.goals import Goals
from conch.analyze.objectives import satisfied, score, valid
from conch.analyze.results import Point


def hopeless(windows: Sequence[Point], rival: Point, goals: Goals) -> bool:
    """Whether the point that ``windows`` (each as if it were the point) add up to is clearly worse than ``rival``."""
    if not windows or not satisfied(rival, goals):
        return False
    return all(valid(one) and score(one, rival, goals) < 0.5 for one in windows)
