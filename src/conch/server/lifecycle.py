"""Loads, reloads and unloads models, and keeps the table of their states true.

Runs on the event loop; disks are read in threads.  A load starts new versions and then swaps them in; those that they
replace serve until then and end after their last request.  A model is loaded and unloaded under its lock, so other
models load at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from itertools import chain

from conch.errors import ConchError, unavailable
from conch.repository.fingerprint import ExternalFiles
from conch.repository.override import Override
from conch.repository.scan import ModelRepository
from conch.server.loading import Loader
from conch.server.operation import LoadOperation, NameLocks, RunningLoads
from conch.server.rollout import Rollout
from conch.server.states import ModelTable, State, ambiguous

LOG = logging.getLogger("conch")

#: How long an unload waits for the members of an ensemble that has no requests left (s).
_PROMPT_SECONDS = 0.5


class Lifecycle:
    """The one writer of the model table."""

    def __init__(self, repository: ModelRepository, loader: Loader, table: ModelTable, rollout: Rollout) -> None:
        self._repository = repository
        self._loader = loader
        self._table = table
        self._rollout = rollout
        self._locks = NameLocks()
        self._loading = RunningLoads()
        self._unloading: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def load_all(self, names: Iterable[str]) -> dict[str, ConchError]:
        """Load several models.  Returns the errors of those that failed, by name."""
        self._refuse_if_closed()
        names = sorted(set(names))
        operation = self._operation(frozenset(names))
        results = await asyncio.gather(*(operation.load(name) for name in names), return_exceptions=True)
        failed: dict[str, ConchError] = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, ConchError):
                failed[name] = result
            elif isinstance(result, BaseException):
                raise result
        self._revalidate(names)
        await self._restore(names)
        return failed

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load or reload one model and, for an ensemble, the members that are not there yet.

        Raises the reason; what served before serves on.  All of it goes on when the caller is cancelled.
        """
        self._refuse_if_closed()
        task = asyncio.get_running_loop().create_task(self._load(name, override))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, override: Override | None) -> None:
        await self._operation(frozenset([name]), override).load(name)
        self._revalidate([name])
        await self._restore([name])

    async def load_named(self, name: str, override: Override | None = None) -> None:
        """Load the model of a name, or in several repositories all models of that name; raises as :meth:`load` does.

        Raises INVALID_ARG for an override that several models would get.
        """
        if not self._table.naming:
            await self.load(name, override)
            return
        keys = await self._repository.aside(partial(self._repository.keys, name)) or self._table.keys(name) or [name]
        if override and len(keys) > 1:
            raise ambiguous(name, len(keys))
        for key in keys:
            await self.load(key, override)

    async def unload_named(self, name: str, dependents: bool = False) -> None:
        """Stop serving all models of a name."""
        for key in self._table.keys(name) or [name]:
            await self.unload(key, dependents)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model; returns while its last requests still run.  A load of it is given up.

        ``dependents`` are the members of an ensemble that nobody asked for by name and nobody else needs.
        """
        self._loading.give_up("the model was unloaded meanwhile", name)
        async with self._locks.of(name):
            model_state = self._table.models.get(name)
            if model_state is None:
                return
            members = model_state.members
            model_state.wanted = False
            self._rollout.retire_all(model_state)
            self._revalidate([name])
        if dependents:
            task = asyncio.get_running_loop().create_task(self._unload_members(name, members))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)
            await asyncio.wait([task], timeout=_PROMPT_SECONDS)

    def external_files(self) -> dict[str, ExternalFiles]:
        """By model, the files outside of its directory that its versions were loaded from."""
        return {
            name: dict(chain.from_iterable(model.external.items() for model in model_state.models()))
            for name, model_state in self._table.models.items()
        }

    def is_loading(self, name: str) -> bool:
        """Whether an unload of the model would end a load of it."""
        return self._loading.includes(name)

    async def retired(self, name: str) -> None:
        """Wait until what has been replaced or unloaded of a model so far has ended."""
        await self._rollout.retired(name)

    async def close(self) -> None:
        """Give up what is being loaded, and accept no further loads; the models that serve are left as they are."""
        self._closed = True
        tasks = [*self._loading.give_up("the server is stopping"), *self._unloading, *self._finishing]
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise unavailable("the server is stopping and loads no models")

    async def _unload_members(self, ensemble: str, members: set[str]) -> None:
        """Stop serving the members that nobody else needs, once the ensemble's last requests have ended."""
        await self._rollout.retired(ensemble)
        for member in sorted(members):
            async with self._locks.of(member):
                model_state = self._table.models.get(member)
                if model_state is not None and not model_state.wanted and not self._is_member(member):
                    self._rollout.retire_all(model_state)

    def _is_member(self, name: str) -> bool:
        """Whether an ensemble that serves, or is being loaded, has a step of this model."""
        serving = (state.members for state in self._table.models.values() if state.ready_versions())
        return any(name in members for members in (*serving, *self._locks.members.values()))

    def _operation(self, wanted: frozenset[str], override: Override | None = None) -> LoadOperation:
        return LoadOperation(
            self._repository, self._loader, self._table, self._rollout, self._locks, wanted, override, self._loading
        )

    def _revalidate(self, changed: Iterable[str]) -> None:
        """Look at the ensembles whose members have changed; those that do not fit any more stop serving."""
        names = set(changed)
        for ensemble in list(self._table.models.values()):
            if ensemble.name in names or not ensemble.members & names or not ensemble.models():
                continue
            for version, version_state in list(ensemble.versions.items()):
                model = version_state.model
                if version_state.state is not State.READY or model is None:
                    continue
                try:
                    self._loader.check_ensemble(model.config, self._rollout.members_of(model.config, model.steps))
                except ConchError as error:
                    LOG.error("failed to load '%s' version %d: %s", ensemble.name, version, error.status)
                    self._rollout.end(model, None)
                    version_state.make_unavailable(error.public_status)
                    self._revalidate([ensemble.name])

    async def _restore(self, loaded: Iterable[str]) -> None:
        """Have ensembles serve again that had lost members, now that all are back; not those that were unloaded."""
        names = set(loaded)
        for ensemble in list(self._table.models.values()):
            if not ensemble.members & names or not ensemble.is_disabled:
                continue
            async with self._locks.of(ensemble.name):
                restored = ensemble.is_disabled and await self._rollout.restore(ensemble)
            if restored:
                await self._restore([ensemble.name])
