"""Makes one search: one candidate after the other is served, measured and noted.

The strategies say what is measured next; this module has the hands.  Every point is in the checkpoint before the next
one is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from conch.analyze.judging.goals import Goals
from conch.analyze.judging.objectives import unknown, valid
from conch.analyze.judging.pruning import hopeless
from conch.analyze.judging.ranking import Ranking, rank
from conch.analyze.judging.turns import FinalTurns, TurnPair
from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.profiling.measurement import CandidateMeasurement
from conch.analyze.profiling.plans import plan_of
from conch.analyze.profiling.progress import Pace, ProfileObserver, SearchProgress
from conch.analyze.results import Candidate, CandidateResult, Point
from conch.analyze.search.searches import Search
from conch.analyze.search.strategies.choice import axis_of, strategy_of
from conch.analyze.search.strategies.strategy import Trial
from conch.analyze.servers.base import AnalyzedServer, Configs, Overrides, ServerGone, ServerLost
from conch.analyze.servers.configurations import check_in_force, concise, with_ensembles
from conch.analyze.storage.checkpoint import AnalysisCheckpoint
from conch.errors import ConchError, invalid

#: How often a point that others disturbed is measured.
ATTEMPTS: Final = 2


@dataclass(frozen=True)
class SearchOutcome:
    """A search with what its candidates measured, the default's first; ``complete`` says that it came to its end, and
    ``turns`` has its winner beside the default, where that was measured."""

    search: Search
    results: Sequence[CandidateResult]
    complete: bool
    turns: FinalTurns | None = None

    @property
    def ranking(self) -> Ranking:
        """The candidates, the best first."""
        return rank(self.results, self.search.goals)


class SearchRun:
    """One search: what is loaded, what is measured, and what came out."""

    def __init__(
        self, settings: AnalyzeSettings, search: Search, server: AnalyzedServer, checkpoint: AnalysisCheckpoint,
        observer: ProfileObserver, configs: Configs,
    ) -> None:  # fmt: skip
        self._settings, self._search, self._server = settings, search, server
        self._checkpoint, self._observer, self._configs = checkpoint, observer, configs
        self._strategy = strategy_of(settings, search)
        self._pace = Pace(time.monotonic())
        self._results: dict[str, CandidateResult] = {}
        self._loaded: str | None = None
        self._measurement: CandidateMeasurement | None = None
        self._complete = False
        self._turns: FinalTurns | None = None

    def to_the_end(self, keep: Callable[[Candidate], None]) -> None:
        """Measure what the strategy asks for until it asks for no more; ``keep`` is told of candidates once."""
        while (trial := self._strategy.next()) is not None:
            name = trial.candidate.name
            if name not in self._results:
                known = self._checkpoint.configs(tuple(self._search.space.configs), trial.candidate)
                self._results[name] = CandidateResult(trial.candidate, configs=known)
                keep(trial.candidate)
            self._take(trial)
        self._compare()
        self._complete = True

    def outcome(self) -> SearchOutcome:
        """What is known so far; a candidate that is being measured for the first time is not."""
        default = self._search.space.default.name
        known = [one for one in self._results.values() if one.points or one.error]
        ordered = sorted(known, key=lambda one: one.candidate.name != default)
        return SearchOutcome(self._search, ordered, self._complete, self._turns)

    def close(self) -> None:
        """Send no more."""
        if self._measurement is not None:
            self._measurement.close()
            self._measurement = None

    def _compare(self) -> None:
        """Measure the winner and the default in turns, each at its best load: default, winner, winner, default …"""
        ranking = rank(list(self._results.values()), self._search.goals)
        winner, default = ranking.winner, ranking.default
        rounds = self._settings.final_rounds
        if winner is None or default is None or winner is default or not valid(default.point) or not rounds:
            return
        models = tuple(self._search.space.configs)
        both = [Trial(row.result.candidate, row.point.load) for row in (default, winner)]
        done = list(self._checkpoint.turns(models, both[1].candidate, winner.point.load))
        if len(done) < rounds:
            self._observer.say(f"{default.name} and {winner.name} are measured in turns.")
        try:
            while len(done) < rounds:
                order = both if len(done) % 2 == 0 else both[::-1]
                points = {trial.candidate.name: self._turn(trial) for trial in order}
                turn = TurnPair(points[default.name], points[winner.name])
                self._checkpoint.add_turn(models, both[1].candidate, turn)
                done.append(turn)
        except ServerLost:
            raise
        except ConchError as problem:
            self._loaded = None
            self._observer.say(f"The turns end early: {problem.message}")
        if done:
            self._turns = FinalTurns(winner.name, tuple(done))

    def _turn(self, trial: Trial) -> Point:
        self._observer.measuring(trial, self._progress())
        point = self._measured(trial)
        self._pace.add(time.monotonic())
        self._observer.measured(trial, point, before=False)
        return point

    def _progress(self) -> SearchProgress:
        return self._pace.progress(self._strategy.expected + 2 * self._settings.final_rounds)

    def _take(self, trial: Trial) -> None:
        """One measurement, or what the checkpoint says of it."""
        models = tuple(self._search.space.configs)
        known = self._checkpoint.point(models, trial.candidate, trial.load)
        if known is not None and self._answers(known, trial):
            self._note(trial, known, before=True)
            return
        error = self._checkpoint.failure(models, trial.candidate)
        if error:
            self._fail(trial, error, before=True)
            return
        self._observer.measuring(trial, self._progress())
        try:
            point = self._measured(trial)
        except ServerLost:
            raise  # which says nothing of the candidate
        except ConchError as problem:
            self._loaded = None
            self._checkpoint.fail(models, trial.candidate, problem.message)
            self._fail(trial, problem.message, before=False)
            return
        self._checkpoint.add(models, trial.candidate, point)
        self._note(trial, point, before=False)

    def _answers(self, point: Point, trial: Trial) -> bool:
        """Whether a point of the checkpoint says what is asked now: it may have been measured for other goals."""
        if set(point.models) != set(self._search.models):
            return False
        needed = set(self._search.goals.percentiles)
        if any(one.requests and not needed <= set(one.percentiles) for one in point.models.values()):
            return False
        if point.disturbed and self._settings.repeat_disturbed:
            return False
        if not point.stopped:
            return True
        # It stands for all its windows, however many there were.
        return trial.rival is not None and hopeless([point] * 10, trial.rival, self._search.goals)

    def _measured(self, trial: Trial) -> Point:
        """The point, from the first quiet attempt or the last one; a server that dies is started again once."""
        try:
            return self._attempts(trial)
        except ServerGone as gone:
            self._observer.say(f"{trial.candidate.name}: {gone.message}")
            self._observer.say("Waiting until the server is there again.")
            self.close()
            self._loaded = None
            self._server.restart()
        try:
            return self._attempts(trial)
        except ServerGone:
            self.close()
            self._server.restart()
            raise

    def _attempts(self, trial: Trial) -> Point:
        point = self._attempt(trial)
        for _ in range(ATTEMPTS - 1):
            if point.disturbed:
                point = self._attempt(trial)
        return point

    def _attempt(self, trial: Trial) -> Point:
        try:
            self._serve(trial.candidate)
            return self._ask(trial)
        except ServerGone:
            raise
        except ConchError:
            self._server.check()
            raise

    def _ask(self, trial: Trial) -> Point:
        assert self._measurement is not None
        stop = None
        if trial.rival is not None:
            stop = partial(_clearly_worse, rival=trial.rival, goals=self._search.goals)
        try:
            return self._measurement.measure(trial.load, stop)
        except ServerGone:
            raise
        except ConchError as error:
            told = self._server.complaints()
            # A model that hangs would keep the next candidate waiting until it can be unloaded.
            self.close()
            self._server.restart()
            raise ConchError(f"{error.message}\n{told}" if told else error.message, error.code) from error

    def _serve(self, candidate: Candidate) -> None:
        """Have the server serve the candidate, and processes that send it requests."""
        if self._loaded == candidate.name:
            return
        self.close()
        self._loaded = None
        overrides = changes_of(candidate, self._configs)
        configs = self._server.load(overrides)
        check_in_force(overrides, configs)
        self._checkpoint.loaded(tuple(self._search.space.configs), candidate, configs)
        self._results[candidate.name] = replace(self._results[candidate.name], configs=configs)
        plans = {
            name: plan_of(self._settings, name, self._server.address, self._search.goals.percentiles)
            for name in self._search.models
        }
        self._measurement = CandidateMeasurement(plans, rate=axis_of(self._settings, self._search).rates)
        self._loaded = candidate.name

    def _note(self, trial: Trial, point: Point, *, before: bool) -> None:
        self._strategy.add(trial, point)
        self._pace.add(time.monotonic(), measured=not before)
        result = self._results[trial.candidate.name]
        points = sorted([*result.points, point], key=lambda one: one.load)
        self._results[trial.candidate.name] = replace(result, points=tuple(points))
        self._observer.measured(trial, point, before=before)
        self._check_known(point)

    def _check_known(self, point: Point) -> None:
        """Raise INVALID_ARG where figures that the goals need are not known of this server."""
        missing = unknown(point, self._search.goals) if valid(point) else []
        if missing:
            raise invalid(
                f"{' and '.join(missing)} of the server cannot be seen from here, so no configuration can be judged by"
                " it: leave it out of objectives and constraints, or measure where the server runs"
            )

    def _fail(self, trial: Trial, error: str, *, before: bool) -> None:
        self._strategy.fail(trial)
        self._pace.add(time.monotonic(), measured=not before)
        self._results[trial.candidate.name] = replace(self._results[trial.candidate.name], error=error)
        self._observer.failed(trial, error, before=before)


def changes_of(candidate: Candidate, configs: Configs) -> Overrides:
    return concise(with_ensembles(candidate.overrides, configs), configs)


def _clearly_worse(windows: Sequence[Point], *, rival: Point, goals: Goals) -> bool:
    return hopeless(windows, rival, goals)
