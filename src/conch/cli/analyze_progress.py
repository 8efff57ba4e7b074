"""Shows the progress of an analysis: an updated line on a terminal, otherwise one line per measurement."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status

from conch.measure.analyze.profiling.progress import SearchProgress
from conch.measure.analyze.results import Point
from conch.measure.analyze.search.strategies.strategy import Trial


class ProfileLine:
    """Prints the progress of a profile (:class:`conch.measure.analyze.profiling.progress.ProfileObserver`)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._known = 0
        self._progress = ""

    def say(self, line: str) -> None:
        """Print a message."""
        self._console.print(line, highlight=False, markup=False)

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        """Show the current measurement, its progress, and the remaining time."""
        self._report_known()
        self._progress = f"{progress.done + 1} of about {progress.expected}, about {_time(progress.left)} left"
        if not self._console.is_terminal:
            return
        text = f"{self._progress}: {trial.candidate.name} at {trial.load:g}"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        """Print the figures of a point; points from the journal are only counted."""
        if before:
            self._known += 1
            return
        p99 = max((model.percentiles.get(99, 0.0) for model in point.models.values()), default=0.0)
        text = f"{trial.candidate.name} at {trial.load:g}: {point.throughput:,.0f} infer/s, p99 {p99 * 1000:,.1f} ms"
        doubts = [word for word, holds in (("ended early", point.stopped), ("disturbed", point.disturbed)) if holds]
        doubt = f" ({', '.join(doubts)})" if doubts else ""
        self.say(text + doubt if self._console.is_terminal else f"[{self._progress}] {text}{doubt}")

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        """Print why a candidate is skipped."""
        if before:
            self._known += 1
        else:
            self.say(f"{trial.candidate.name} is skipped: {error}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._report_known()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _report_known(self) -> None:
        if self._known:
            self.say(f"{self._known} measurements are taken from the journal.")
            self._known = 0


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
