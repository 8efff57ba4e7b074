"""When a measurement may end early: its point cannot win any more.

Pure.  Asked after every window of a measurement that has a rival.  The rule: windows that are accepted as agreeing lie
within the stability share s (``conch perf -s``, 10 %) of their mean.  Taking s for the standard deviation of a window,
which is far more than it is, the mean of n windows and that of the rival's three are three standard errors apart when
they differ by more than 3 s sqrt(1/n + 1/3): by 35 % after one window, by 27 % after two.  What is worse by more is not
worse by accident.  A server that is still getting faster is given time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import excess_known, knows_objectives, satisfied, score, valid
from conch.analyze.results import Point

#: The share that windows may be from their mean.
STABILITY: Final = 0.1
#: How many windows the rival was measured in.
_RIVALS: Final = 3


def hopeless(windows: Sequence[Point], rival: Point | None, goals: Goals, *, stability: float = STABILITY) -> bool:
    """Whether the point that is being measured is clearly worse than ``rival``, or breaks a constraint beyond doubt.

    ``windows`` are what it measured so far, each as if it were the whole point; of memory and of the server's stages
    they say nothing, which is no fault of theirs.  Without a rival that keeps the constraints, nothing is hopeless:
    what comes nearest to them has to be known.
    """
    if not windows or rival is None or not satisfied(rival, goals):
        return False
    if not all(map(valid, windows)) or _rising(windows, stability):
        return False
    margin = 3 * stability * sqrt(1 / len(windows) + 1 / _RIVALS)
    worse = all(knows_objectives(window, goals) and score(window, rival, goals) < 1 - margin for window in windows)
    return worse or all(excess_known(window, goals) > margin for window in windows)


def _rising(windows: Sequence[Point], stability: float) -> bool:
    """Whether the last window is better than the first by more than windows differ."""
    return len(windows) > 1 and windows[-1].throughput > windows[0].throughput * (1 + stability)
