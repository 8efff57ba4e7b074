"""Decides when a measurement is stable: the last undisturbed windows agree.

Pure. As in perf_analyzer, the throughput and the latency of three successive windows must be within a fraction of their
mean. A window in which other processes used the machine is repeated instead of counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Number of windows that must agree.
WINDOWS: Final = 3
#: After this many windows on a disturbed machine, windows that agree suffice, with a warning.
_MOST_DISTURBED: Final = 2 * WINDOWS


class JudgedWindow(NamedTuple):
    """The figures by which a window is judged; a latency of 0 means no responses."""

    throughput: float
    latency: float
    disturbed: bool = False


@dataclass(slots=True)
class Stability:
    """Adds windows until the last ``WINDOWS`` agree within the fraction ``share``, or there are ``trials`` windows."""

    share: float = 0.1
    trials: int = 10
    _windows: list[JudgedWindow] = field(default_factory=list)

    def add(self, throughput: float, latency: float, *, disturbed: bool = False) -> None:
        """Add a window; a latency of 0 means no responses."""
        self._windows.append(JudgedWindow(throughput, latency, disturbed))

    @property
    def counted(self) -> list[int]:
        """The numbers of the windows that count: the last undisturbed ones, or the last ones if those are too few.

        Windows after the last response count only if there are no others. A window without responses between others
        counts: a server that stalls for that long, or responds that slowly, is not faster for it.
        """
        count = len(self._windows)
        numbers = range(count - self.silent or count)
        quiet = [number for number in numbers if not self._windows[number].disturbed]
        enough = min(WINDOWS, self.trials)
        return (quiet if len(quiet) >= enough else list(numbers))[-WINDOWS:]

    @property
    def disturbed(self) -> bool:
        """Whether any of the windows that count was disturbed."""
        return any(self._windows[number].disturbed for number in self.counted)

    @property
    def stable(self) -> bool:
        """Whether the windows that count agree; windows without responses never do."""
        counted = [self._windows[number] for number in self.counted]
        return len(counted) >= WINDOWS and all(
            self._agree(values)
            for values in ([window.throughput for window in counted], [window.latency for window in counted])
        )

    @property
    def silent(self) -> int:
        """The number of windows since the last one with a response."""
        answered = [number for number, window in enumerate(self._windows) if window.latency]
        return len(self._windows) - (answered[-1] + 1 if answered else 0)

    @property
    def over(self) -> bool:
        """Whether to stop measuring."""
        count = len(self._windows)
        return count >= self.trials or (
            self.stable and not self.silent and (not self.disturbed or count >= _MOST_DISTURBED)
        )

    def _agree(self, values: Sequence[float]) -> bool:
        mean = sum(values) / len(values)
        return mean > 0 and all(abs(value - mean) <= self.share * mean for value in values)
