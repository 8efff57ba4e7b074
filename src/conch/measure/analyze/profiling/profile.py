"""Runs an analysis: starts the server, opens the journal, and runs the searches one after another.

The strategies choose the measurements of a search; this module performs them: it serves, measures and records the
candidates one by one. Every point is in the journal before the next one is measured.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from conch.checkpoints.manifest import Manifest
from conch.core.errors import ConchError, invalid
from conch.machine.facts import usable_cores
from conch.measure.analyze.journal import Journal, conditions
from conch.measure.analyze.judging.objectives import hopeless, unknown, valid
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.profiling.measurement import CandidateMeasurement, plan_of
from conch.measure.analyze.profiling.progress import Costs, Pace, ProfileObserver, SearchProgress
from conch.measure.analyze.results import Candidate, Point, Trial
from conch.measure.analyze.saved_results import SearchOutcome
from conch.measure.analyze.search.axis import axis_of
from conch.measure.analyze.search.searches import Search, searches
from conch.measure.analyze.search.space import ModelFacts
from conch.measure.analyze.search.strategies import strategy_of
from conch.measure.analyze.servers import (
    AnalyzedServer,
    Configs,
    ControlClient,
    LocalServer,
    Overrides,
    RemoteServer,
    ServerGone,
    ServerLost,
    check_in_force,
    concise,
    with_ensembles,
    write_repository,
)
from conch.measure.perf.figures import WINDOWS
from conch.measure.perf.inputs.specs import read_model
from conch.measure.perf.plan import read_address
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.api import ServerApi
from conch.measure.perf.server.resources import find_server
from conch.measure.perf.traffic import traffic_of
from conch.repository.scan import ModelRepository


def facts_of(repository: ModelRepository | None, configs: Configs, address: Address) -> Mapping[str, ModelFacts]:
    """Return the facts about the models of the completed ``configs``; the server listens at ``address``.

    The number of cores of a server on another machine is unknown.
    """
    threads = usable_cores() if find_server(address).pids else 1
    return {
        model: ModelFacts(model, config, *_variants(repository, model), threads) for model, config in configs.items()
    }


def check_requests(settings: AnalyzeSettings, server: AnalyzedServer, models: Sequence[str]) -> None:
    """Raise the errors of ``conch perf`` for models whose requests need further options, before the measurement.

    The models are loaded with the repository's configuration; batch sizes are left to each candidate.
    """
    with ServerApi(server.address, grpc=settings.client_protocol == "grpc") as api:
        for model in models:
            plan = replace(plan_of(settings, model, server.address), batch_size=1)
            spec = read_model(api.metadata(model, plan.version), api.config(model, plan.version), plan.version)
            traffic_of(plan, spec, "")


def _variants(repository: ModelRepository | None, model: str) -> tuple[tuple[str, ...], str]:
    """Return the usable variants of a converted model's latest version, and the default one; none for other models."""
    try:
        files = repository.describe(model) if repository is not None else None
        manifest = Manifest.read(files.version_directory(files.versions[-1])) if files and files.versions else None
    except ConchError:
        manifest = None
    if manifest is None:
        return (), ""
    return tuple(variant.name for variant in manifest.variants if variant.usable), manifest.auto


#: Time of the budget reserved for startup and reports (s), and its maximum as a fraction of the budget.
_REPORTS: Final = 10.0
_MOST: Final = 0.2


class Profile:
    """An analysis; ``outcomes`` has the results so far, even after an error.

    A context manager: on exit, the server is restored and everything is stopped.
    """

    def __init__(self, settings: AnalyzeSettings, observer: ProfileObserver) -> None:
        self._settings, self._observer = settings, observer
        self._repository = repository_of(settings)
        self._server: AnalyzedServer | None = None
        self._journal: Journal | None = None
        self._done: list[SearchOutcome] = []
        self._running: SearchRun | None = None
        #: The completed configurations of the repository, by model.
        self.configs: Configs = {}

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._server is not None:
            self._server.close()

    @property
    def outcomes(self) -> Sequence[SearchOutcome]:
        """The searches so far, including the current one."""
        return [*self._done, *([self._running.outcome()] if self._running is not None else [])]

    def run(self) -> Sequence[SearchOutcome]:
        """Make all searches; raises ConchError if nothing can be measured, and ServerLost if the server is lost."""
        settings = self._settings
        budget = settings.budget if settings.budget is not None else inf
        end = time.monotonic() + budget - min(_REPORTS, _MOST * budget)
        names = [model.name for model in (*settings.bls_composing_models, *settings.profile_models)]
        server = self._server = open_server(settings, self._repository, list(dict.fromkeys(names)))
        self.configs = server.load({})
        check_requests(settings, server, [model.name for model in settings.profile_models])
        journal = self._journal = Journal(settings.checkpoints, conditions(settings, self._repository, self.configs))
        for change in journal.changes:
            self._observer.say(change)
        all_searches = searches(settings, facts_of(self._repository, self.configs, server.address))
        for number, search in enumerate(all_searches):
            now = time.monotonic()
            deadline = now + (end - now) / (len(all_searches) - number)
            self._running = SearchRun(settings, search, server, journal, self._observer, self.configs, deadline)
            try:
                self._running.to_the_end(self._keep)
            finally:
                self._running.close()
            self._done.append(self._running.outcome())
            self._running = None
        return self._done

    def changes(self, candidate: Candidate) -> Overrides:
        """Return the changes of a candidate to the repository's files, by model."""
        return changes_of(candidate, self.configs)

    def _keep(self, candidate: Candidate) -> None:
        """Write the candidate's repository to the directory of the user's choice."""
        folder = self._settings.output_model_repository_path
        if folder is not None and self._repository is not None:
            write_repository(folder / candidate.name, self._repository, self.changes(candidate))


#: Maximum number of attempts for a disturbed point, and for a failing candidate.
ATTEMPTS: Final = 2
#: Overhead of a measurement in addition to its windows and warm-up: loading, and finishing requests (s).
_BESIDE: Final = 2.0


class SearchRun:
    """A running search: the loaded candidate, its measurement, and the results."""

    def __init__(
        self, settings: AnalyzeSettings, search: Search, server: AnalyzedServer, journal: Journal,
        observer: ProfileObserver, configs: Configs, deadline: float = inf,
    ) -> None:  # fmt: skip
        """Create the run; ``deadline`` is the end of all measurements (``time.monotonic``)."""
        self._settings, self._search, self._server = settings, search, server
        self._journal, self._observer, self._configs = journal, observer, configs
        self._strategy = strategy_of(settings, search)
        self._deadline = deadline
        plan = plan_of(settings, search.models[0], server.address)
        guess = plan.warm_up + WINDOWS * plan.interval + _BESIDE
        self._pace, self._costs = Pace(time.monotonic(), guess), Costs(guess)
        #: Configurations in force, and errors, by candidate.
        self._loaded_configs: dict[str, Configs] = {}
        self._errors: dict[str, str] = {}
        #: Number of completed measurements, by candidate, load and finalist (in final rounds).
        self._completed: Counter[tuple[str, float, str]] = Counter()
        self._loaded: str | None = None
        self._measurement: CandidateMeasurement | None = None
        self._complete = False

    def to_the_end(self, keep: Callable[[Candidate], None]) -> None:
        """Run the trials of the strategy until there are no more.

        A search ends while there is time for the final rounds, and these end before a round that would pass the
        deadline. ``keep`` is called once for each candidate.
        """
        self._report_plan()
        while (trial := self._strategy.next()) is not None:
            if not self._next_fits():
                ends = (
                    "The time for the search is up." if trial.finalist is None else "The time for final rounds is up."
                )
                self._observer.say(ends)
                self._strategy.end_phase()
                continue
            name = trial.candidate.name
            if name not in self._loaded_configs:
                known = self._journal.configs(tuple(self._search.space.configs), trial.candidate)
                self._loaded_configs[name] = known
                keep(trial.candidate)
            self._take(trial)
        self._complete = True

    def _progress(self) -> SearchProgress:
        """The progress and the estimated time left, limited by the budget."""
        progress = self._pace.progress(self._strategy.expected)
        return replace(progress, left=max(0.0, min(progress.left, self._deadline - time.monotonic())))

    def _next_fits(self) -> bool:
        """Return whether the next measurement and those that make it useful fit; True for the first one."""
        if self._deadline == inf or not self._completed:
            return True
        return self._costs.of(self._strategy.ahead, self._loaded) <= self._deadline - time.monotonic()

    def _report_plan(self) -> None:
        minutes = self._progress().left / 60
        space = self._search.space
        names = dict.fromkeys(dimension.name for dimension in space.dimensions)
        self._observer.say(
            f"Plan for {space.name}: the default at rising loads, up to {space.distinct} configurations"
            f" ({', '.join(names) or 'no other'}), final rounds"
            f" against the default ({self._settings.final_rounds}); about {max(minutes, 1):.0f} min"
        )
        if skipped := space.size - space.distinct:
            self._observer.say(
                f"Skipped: {skipped} of {space.size} combinations, which the server treats the same as one of the"
                f" {space.distinct}."
            )

    def outcome(self) -> SearchOutcome:
        """Return the results so far, without a candidate whose first measurement is in progress."""
        results = []
        for result in self._strategy.results:
            error = self._errors.get(result.candidate.name, "")
            if result.points or error:
                configs = self._loaded_configs.get(result.candidate.name) or result.configs
                results.append(replace(result, error=error, configs=configs))
        search = self._search
        return SearchOutcome(search.models, search.goals, results, self._complete, self._strategy.final)

    def close(self) -> None:
        """Stop all requests."""
        if self._measurement is not None:
            self._measurement.close()
            self._measurement = None

    def _take(self, trial: Trial) -> None:
        """Measure a trial, or take its result from the journal."""
        models = tuple(self._search.space.configs)
        known = self._journal.points(models, trial.candidate, trial.load, trial.finalist)
        usable = [point for point in known if self._is_usable(point, trial)]
        before = self._completed[_key(trial)]
        if before < len(usable):
            self._note(trial, usable[before], before=True)
            return
        error = self._journal.failure(models, trial.candidate)
        if error and not self._settings.retry_failed:
            self._fail(trial, error, before=True)
            return
        self._observer.measuring(trial, self._progress())
        try:
            point = self._twice(trial)
        except ServerLost:
            raise  # not informative about the candidate
        except ConchError as problem:
            self._loaded = None
            if trial.finalist is None:
                self._journal.fail(models, trial.candidate, problem.message)
            self._fail(trial, problem.message, before=False)
            return
        self._journal.add(models, trial.candidate, point, trial.finalist)
        self._note(trial, point, before=False)

    def _is_usable(self, point: Point, trial: Trial) -> bool:
        """Return whether a point in the journal is usable for a trial: it may have been measured for other goals."""
        if set(point.models) != set(self._search.models):
            return False
        needed = set(self._search.goals.percentiles)
        if any(model.requests and not needed <= set(model.percentiles) for model in point.models.values()):
            return False
        if point.disturbed and self._settings.repeat_disturbed:
            return False
        if not point.stopped:
            return True
        # A stopped point represents all its windows, regardless of their number.
        return trial.rival is not None and hopeless([point] * 10, trial.rival, self._search.goals)

    def _twice(self, trial: Trial) -> Point:
        """Measure a point; a failing candidate is retried once, because the failure may be temporary."""
        try:
            return self._measured(trial)
        except ServerLost:
            raise
        except ConchError:
            self._loaded = None
            return self._measured(trial)

    def _measured(self, trial: Trial) -> Point:
        """Return the point of the first quiet attempt, or of the last one; restarts a server that dies once."""
        try:
            return self._attempts(trial)
        except ServerGone as gone:
            self._observer.say(f"{trial.candidate.name}: {gone.message}")
            self._observer.say("Waiting for the server to restart.")
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
            if point.disturbed and self._settings.budget is None:
                point = self._attempt(trial)
        return point

    def _attempt(self, trial: Trial) -> Point:
        try:
            self._serve(trial.candidate)
            start = time.monotonic()
            point = self._measure(trial)
            self._costs.measured(time.monotonic() - start)
            return point
        except ServerGone:
            raise
        except ConchError:
            self._server.check()
            raise

    def _measure(self, trial: Trial) -> Point:
        assert self._measurement is not None
        stop = None
        if trial.rival is not None:
            stop = partial(hopeless, rival=trial.rival, goals=self._search.goals)
        try:
            return self._measurement.measure(trial.load, stop)
        except ServerGone:
            raise
        except ConchError as error:
            complaints = self._server.complaints()
            # A model that hangs would delay the next candidate until it can be unloaded.
            self.close()
            self._server.restart()
            raise ConchError(f"{error.message}\n{complaints}" if complaints else error.message, error.code) from error

    def _serve(self, candidate: Candidate) -> None:
        """Load the candidate, and start the processes that send requests."""
        if self._loaded == candidate.name:
            return
        self.close()
        self._loaded = None
        start = time.monotonic()
        overrides = changes_of(candidate, self._configs)
        configs = self._server.load(overrides)
        self._costs.loaded(candidate.name, time.monotonic() - start)
        check_in_force(overrides, configs)
        self._journal.loaded(tuple(self._search.space.configs), candidate, configs)
        self._loaded_configs[candidate.name] = configs
        plans = {
            name: plan_of(self._settings, name, self._server.address, self._search.goals.percentiles)
            for name in self._search.models
        }
        self._measurement = CandidateMeasurement(plans, rate=axis_of(self._settings, self._search.models).rates)
        self._loaded = candidate.name

    def _note(self, trial: Trial, point: Point, *, before: bool) -> None:
        self._strategy.add(trial, point)
        self._pace.add(time.monotonic(), measured=not before)
        self._completed[_key(trial)] += 1
        self._observer.measured(trial, point, before=before)
        self._check_known(point)

    def _check_known(self, point: Point) -> None:
        """Raise INVALID_ARG if figures that the goals need are unavailable for this server."""
        missing = unknown(point, self._search.goals) if valid(point) else []
        if missing:
            raise invalid(
                f"{' and '.join(missing)} of the server cannot be measured from this machine: remove it from the"
                " objectives and constraints, or run the analysis on the server's machine"
            )

    def _fail(self, trial: Trial, error: str, *, before: bool) -> None:
        self._strategy.add(trial, None)
        self._pace.add(time.monotonic(), measured=not before)
        if trial.finalist is None:
            self._errors[trial.candidate.name] = error
        self._observer.failed(trial, error, before=before)


def _key(trial: Trial) -> tuple[str, float, str]:
    return trial.candidate.name, trial.load, trial.finalist.name if trial.finalist is not None else ""


def changes_of(candidate: Candidate, configs: Configs) -> Overrides:
    return concise(with_ensembles(candidate.overrides, configs), configs)


#: The name of the server's log, in the directory of the reports.
LOG: Final = "server.log"


def open_server(settings: AnalyzeSettings, repository: ModelRepository | None, models: Sequence[str]) -> AnalyzedServer:
    """Return the server of ``triton_launch_mode``, with ``models`` and their ensemble steps.

    Raises INVALID_ARG for settings that do not define a server.
    """
    if settings.triton_launch_mode == "local":
        if repository is None:
            raise invalid("model_repository: set the models' folder (-m), or use a running server (--mode remote)")
        names = repository.names()
        for model in models:
            if model not in names:
                raise invalid(f"profile_models: there is no model '{model}'; the models are {', '.join(sorted(names))}")
        settings.export_path.mkdir(parents=True, exist_ok=True)
        environment = {name: str(value) for name, value in settings.triton_server_environment.items()}
        return LocalServer(
            repository, models, settings.export_path / LOG,
            protocol=settings.client_protocol, flags=_flags(settings), environment=environment,
            timeout=settings.perf_analyzer_timeout,
        )  # fmt: skip
    grpc = settings.client_protocol == "grpc"
    endpoint = settings.triton_grpc_endpoint if grpc else settings.triton_http_endpoint
    address, path = read_address(endpoint, settings.client_protocol)
    if path:
        raise invalid(f"triton_http_endpoint: {endpoint} has a path, but requests are sent to host:port")
    timeout = settings.perf_analyzer_timeout
    control = ControlClient(address, timeout, grpc=grpc)
    return RemoteServer(control, address, models, reload=not settings.reload_model_disable)


def _flags(settings: AnalyzeSettings) -> list[str]:
    """Return the additional flags of ``conch serve``; flags that the analysis sets itself are refused."""
    flags = []
    for name, value in settings.triton_server_flags.items():
        flag = name.lstrip("-").replace("_", "-")
        if flag.endswith(("-port", "-address")) or flag in ("model-repository", "model-control-mode", "load-model"):
            raise invalid(f"triton_server_flags: {name} is set by the analysis")
        flags.append(f"--{flag}={str(value).lower() if isinstance(value, bool) else value}")
    return flags


def repository_of(settings: AnalyzeSettings) -> ModelRepository | None:
    """Return the user's repository, or None for a remote server; raises INVALID_ARG for a directory without models."""
    if settings.model_repository is None:
        return None
    return ModelRepository([Path(os.path.abspath(settings.model_repository))])
