"""Takes an analysis from settings to rankings: a server, a checkpoint, and one search after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from types import TracebackType
from typing import Final

from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.profiling.inspection import check_requests, facts_of
from conch.analyze.profiling.progress import ProfileObserver
from conch.analyze.profiling.search_run import SearchOutcome, SearchRun, changes_of
from conch.analyze.results import Candidate
from conch.analyze.search.searches import searches
from conch.analyze.servers.base import AnalyzedServer, Configs, Overrides
from conch.analyze.servers.choice import open_server, repository_of
from conch.analyze.servers.copies import write_repository
from conch.analyze.storage.checkpoint import AnalysisCheckpoint
from conch.analyze.storage.conditions import conditions

#: The time that a budget leaves for starting and for the reports (s), and the largest share of the budget for it.
_REPORTS: Final = 10.0
_MOST: Final = 0.2


class Profile:
    """An analysis, from ``run`` on; what it found so far is in ``outcomes``, whatever ended it.

    A context: when it is left, the server is as it was before, and nothing runs any more.
    """

    def __init__(self, settings: AnalyzeSettings, observer: ProfileObserver) -> None:
        self._settings, self._observer = settings, observer
        self._repository = repository_of(settings)
        self._server: AnalyzedServer | None = None
        self._checkpoint: AnalysisCheckpoint | None = None
        self._done: list[SearchOutcome] = []
        self._running: SearchRun | None = None
        #: The completed configurations of the repository, by model.
        self.configs: Configs = {}

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
        if self._server is not None:
            self._server.close()

    @property
    def outcomes(self) -> Sequence[SearchOutcome]:
        """The searches so far, the one that runs as far as it is."""
        return [*self._done, *([self._running.outcome()] if self._running is not None else [])]

    def run(self) -> Sequence[SearchOutcome]:
        """Make all searches.  Raises ConchError where nothing can be measured, ServerLost where nothing more can be."""
        settings = self._settings
        budget = settings.budget if settings.budget is not None else inf
        end = time.monotonic() + budget - min(_REPORTS, _MOST * budget)
        names = [one.name for one in (*settings.bls_composing_models, *settings.profile_models)]
        server = self._server = open_server(settings, self._repository, list(dict.fromkeys(names)))
        self.configs = server.load({})
        check_requests(settings, server, [one.name for one in settings.profile_models])
        checkpoint = self._checkpoint = AnalysisCheckpoint(
            settings.checkpoints, conditions(settings, self._repository, self.configs)
        )
        for change in checkpoint.changes:
            self._observer.say(change)
        all_searches = searches(settings, facts_of(self._repository, self.configs, server.address))
        for number, search in enumerate(all_searches):
            now = time.monotonic()
            deadline = now + (end - now) / (len(all_searches) - number)
            self._running = SearchRun(settings, search, server, checkpoint, self._observer, self.configs, deadline)
            try:
                self._running.to_the_end(self._keep)
            finally:
                self._running.close()
            self._done.append(self._running.outcome())
            self._running = None
        return self._done

    def changes(self, candidate: Candidate) -> Overrides:
        """What a candidate changes in the repository's files, by model."""
        return changes_of(candidate, self.configs)

    def _keep(self, candidate: Candidate) -> None:
        """Write the candidate's repository where the user wants to have it."""
        folder = self._settings.output_model_repository_path
        if folder is not None and self._repository is not None:
            write_repository(folder / candidate.name, self._repository, self.changes(candidate))
