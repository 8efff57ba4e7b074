"""Decides whether a measurement may end early, because its point cannot win.

Pure. Called after every window of a measurement with a rival. Windows that agree lie within the fraction s (``conch
perf -s``, 10 %) of their mean. If s is taken as the standard deviation of a window, which is far too high, then the
mean of n windows and the mean of the rival's three are three standard errors apart when they differ by more than 3 s
sqrt(1/n + 1/3): 35 % after one window, 27 % after two. A point that is worse by more is not worse by accident. A server
that is still getting faster continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.objectives import excess_known, knows_objectives, satisfied, score, valid
from conch.measure.analyze.results import Point

#: The relative deviation of windows from their mean.
STABILITY: Final = 0.1
#: Number of windows of the rival.
_RIVALS: Final = 3


def hopeless(windows: Sequence[Point], rival: Point | None, goals: Goals, *, stability: float = STABILITY) -> bool:
    """Return whether the point being measured is clearly worse than ``rival``, or clearly violates a constraint.

    ``windows`` are its windows so far, each as a whole point; they have neither memory nor server stages, which are
    ignored. Without a rival that satisfies the constraints the result is False, because the candidate nearest to the
    constraints must be known.
    """
    if not windows or rival is None or not satisfied(rival, goals):
        return False
    if not all(map(valid, windows)) or _rising(windows, stability):
        return False
    margin = 3 * stability * sqrt(1 / len(windows) + 1 / _RIVALS)
    worse = all(knows_objectives(window, goals) and score(window, rival, goals) < 1 - margin for window in windows)
    return worse or all(excess_known(window, goals) > margin for window in windows)


def _rising(windows: Sequence[Point], stability: float) -> bool:
    """Return whether the last window is better than the first by more than windows differ."""
    return len(windows) > 1 and windows[-1].throughput > windows[0].throughput * (1 + stability)
