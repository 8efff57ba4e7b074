"""When a measurement has settled: the last undisturbed windows agree.

Pure.  As in perf_analyzer, three windows in a row whose throughput and latency are within a share of their mean; a
window in which others used the machine is repeated instead of counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: How many windows have to agree.
WINDOWS: Final = 3
#: A machine that is disturbed for so many windows will not be quiet soon: those that agree will do, with a warning.
_PATIENCE: Final = 2 * WINDOWS


class JudgedWindow(NamedTuple):
    """What a window is judged by; a latency of 0 is one without answers."""

    throughput: float
    latency: float
    disturbed: bool = False


@dataclass(slots=True)
class Stability:
    """Takes windows until the last ``WINDOWS`` agree within ``share`` (0.1 is 10 %), or there were ``trials``."""

    share: float = 0.1
    trials: int = 10
    _windows: list[JudgedWindow] = field(default_factory=list)

    def add(self, throughput: float, latency: float, *, disturbed: bool = False) -> None:
        """Note a window; a latency of 0 is one without answers."""
        self._windows.append(JudgedWindow(throughput, latency, disturbed))

    @property
    def counted(self) -> list[int]:
        """The numbers of the windows that count: the last undisturbed ones, or the last ones if those are too few.

        Those after the last answer count only where there are no others.  One without answers between others does: a
        server that stands still for so long, or answers so slowly, is not faster for it.
        """
        count = len(self._windows)
        numbers = range(count - self.silent or count)
        quiet = [number for number in numbers if not self._windows[number].disturbed]
        enough = min(WINDOWS, self.trials)
        return (quiet if len(quiet) >= enough else list(numbers))[-WINDOWS:]

    @property
    def disturbed(self) -> bool:
        """Whether windows that count were disturbed."""
        return any(self._windows[number].disturbed for number in self.counted)

    @property
    def stable(self) -> bool:
        """Whether the windows that count agree; windows without answers never do."""
        counted = [self._windows[number] for number in self.counted]
        return len(counted) >= WINDOWS and all(
            self._agree(values) for values in ([one.throughput for one in counted], [one.latency for one in counted])
        )

    @property
    def silent(self) -> int:
        """How many windows there were since one with an answer."""
        answered = [number for number, window in enumerate(self._windows) if window.latency]
        return len(self._windows) - (answered[-1] + 1 if answered else 0)

    @property
    def over(self) -> bool:
        """Whether to measure no more."""
        count = len(self._windows)
        return count >= self.trials or (self.stable and not self.silent and (not self.disturbed or count >= _PATIENCE))

    def _agree(self, values: Sequence[float]) -> bool:
        mean = sum(values) / len(values)
        return mean > 0 and all(abs(value - mean) <= self.share * mean for value in values)
