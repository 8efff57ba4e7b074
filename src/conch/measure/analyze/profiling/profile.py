"""Runs an analysis: starts the server, opens the journal, and makes one search after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from types import TracebackType
from typing import Final

from conch.checkpoints.manifest import Manifest
from conch.core.errors import ConchError
from conch.machine.facts import usable_cores
from conch.measure.analyze.journal import Journal, conditions
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.profiling.measurement import plan_of
from conch.measure.analyze.profiling.progress import ProfileObserver
from conch.measure.analyze.profiling.search_run import SearchOutcome, SearchRun, changes_of
from conch.measure.analyze.results import Candidate
from conch.measure.analyze.search.searches import searches
from conch.measure.analyze.search.space import ModelFacts
from conch.measure.analyze.servers.base import AnalyzedServer, Configs, Overrides
from conch.measure.analyze.servers.choice import open_server, repository_of
from conch.measure.analyze.servers.local import write_repository
from conch.measure.perf.inputs.specs import read_model
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.api import ServerApi
from conch.measure.perf.server.processes import find_server
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
