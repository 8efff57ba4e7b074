"""The progress of an analysis, the estimate of its remaining time, and its observer. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from conch.measure.analyze.results import Point, Trial

#: Factor by which measurements may take longer than earlier ones.
_SPARE: Final = 1.25


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The number of measurements done and expected, and the remaining time (s)."""

    done: int
    expected: int
    left: float


class Pace:
    """Records the duration of measurements; those from the journal count as done and take no time."""

    def __init__(self, now: float, guess: float) -> None:
        """Start at ``now``; ``guess`` is the duration of a measurement until one is done (s)."""
        self._guess = guess
        self._started = now
        self._now = now
        self._done = 0
        self._measured = 0

    def add(self, now: float, *, measured: bool = True) -> None:
        """Record a measurement that ended at ``now`` (s, monotonic)."""
        self._done += 1
        if measured:
            self._measured += 1
            self._now = now
        elif not self._measured:
            self._started = self._now = now

    def progress(self, expected: int) -> SearchProgress:
        """Return the progress; ``expected`` is the total number of measurements."""
        expected = max(expected, self._done)
        return SearchProgress(self._done, expected, self.each * (expected - self._done))

    @property
    def each(self) -> float:
        """The average duration of a measurement (s)."""
        return (self._now - self._started) / self._measured if self._measured else self._guess


class Costs:
    """Estimates the duration of further measurements: loading the candidates, and their windows."""

    def __init__(self, guess: float) -> None:
        """Start without measurements; ``guess`` is the duration of one until one is done (s)."""
        self._guess = guess
        self._loading: dict[str, float] = {}
        self._measuring: list[float] = []

    def loaded(self, candidate: str, seconds: float) -> None:
        """Record how long a candidate took to load (s)."""
        self._loading[candidate] = seconds

    def measured(self, seconds: float) -> None:
        """Record how long a measurement took without loading (s)."""
        self._measuring.append(seconds)

    def of(self, trials: Sequence[Trial], loaded: str | None) -> float:
        """Return the estimated duration of the trials in order (s); ``loaded`` is the server's current candidate."""
        longest = max(self._loading.values(), default=0.0)
        average = sum(self._measuring) / len(self._measuring) if self._measuring else self._guess
        total = len(trials) * average
        for trial in trials:
            if trial.candidate.name != loaded:
                loaded = trial.candidate.name
                total += self._loading.get(loaded, longest)
        return _SPARE * total


class ProfileObserver(Protocol):
    """Receives the events of an analysis, in its thread."""

    def say(self, line: str) -> None:
        """Show a line to the user."""

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        """Handle the start of a measurement."""

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        """Handle a point that was measured, or read from the journal (``before``)."""

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        """Handle a candidate that could not be served or measured."""
