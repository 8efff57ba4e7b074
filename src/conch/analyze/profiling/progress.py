"""How far an analysis is, how long it will take, and who is told.  Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from conch.analyze.results import Point
from conch.analyze.search.strategies.strategy import Trial

#: Measurements may take so many times as long as earlier ones.
_SPARE: Final = 1.25


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Measurements ``done`` of those ``expected``, and the ``left`` seconds."""

    done: int
    expected: int
    left: float


class Pace:
    """Notes how long measurements take.  What a checkpoint brings counts as done and takes no time."""

    def __init__(self, now: float, guess: float) -> None:
        """``guess`` is how long a measurement takes as long as none is done (s)."""
        self._guess = guess
        self._started = now
        self._now = now
        self._done = 0
        self._measured = 0

    def add(self, now: float, *, measured: bool = True) -> None:
        """Note that one more is done at ``now`` (seconds of any clock that does not jump)."""
        self._done += 1
        if measured:
            self._measured += 1
            self._now = now
        elif not self._measured:
            self._started = self._now = now

    def progress(self, expected: int) -> SearchProgress:
        """How far it is, where ``expected`` measurements are needed in all."""
        expected = max(expected, self._done)
        return SearchProgress(self._done, expected, self.each * (expected - self._done))

    @property
    def each(self) -> float:
        """How long a measurement takes on average (s)."""
        return (self._now - self._started) / self._measured if self._measured else self._guess


class Costs:
    """Estimates how long measurements will take: loading the candidates, and their windows."""

    def __init__(self, guess: float) -> None:
        """``guess`` is how long a measurement takes as long as none is done (s)."""
        self._guess = guess
        self._loading: dict[str, float] = {}
        self._measuring: list[float] = []

    def loaded(self, candidate: str, seconds: float) -> None:
        """Note how long it took to load a candidate."""
        self._loading[candidate] = seconds

    def measured(self, seconds: float) -> None:
        """Note how long a measurement took, without the loading."""
        self._measuring.append(seconds)

    def of(self, trials: Sequence[Trial], loaded: str | None) -> float:
        """How long the trials will take in their order (s); ``loaded`` is the candidate that the server has."""
        longest = max(self._loading.values(), default=0.0)
        each = sum(self._measuring) / len(self._measuring) if self._measuring else self._guess
        total = len(trials) * each
        for trial in trials:
            if trial.candidate.name != loaded:
                loaded = trial.candidate.name
                total += self._loading.get(loaded, longest)
        return _SPARE * total


class ProfileObserver(Protocol):
    """Is told how an analysis goes on, in its thread."""

    def say(self, line: str) -> None:
        """Something that people want to read once."""

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        """A measurement begins."""

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        """A point is there; ``before`` says that the checkpoint had it."""

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        """The candidate could not be served or measured."""
