"""Loads, reloads and unloads models, and keeps the table of their states true.

Runs on the event loop; disks are read in threads.  A load starts new versions and then swaps them in; those that they
replace serve until then and end after their last request.  A model is loaded and unloaded under its lock, so other
models load at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from conch.config.schema import ModelConfig, is_ensemble
from conch.config.validate_ensemble import circular_dependency, cycle_of
from conch.errors import Code, ConchError, unavailable
from conch.repository.errors import NotFoundError, NotUniqueError, PollError, without_directories
from conch.repository.fingerprint import ExternalFiles, take_external
from conch.repository.model_files import ModelFiles
from conch.repository.override import (
    Override,
    UploadedModel,
    describe_override,
    needs_no_directory,
    read_override,
)
from conch.repository.scan import ModelRepository
from conch.server.models.loading import Loader
from conch.server.models.overrides import check_same_code
from conch.server.models.rollout import Rollout
from conch.server.models.states import ModelState, ModelTable, State, ambiguous

# Made by the lifecycle for every call; runs on the event loop and reads disks in threads.


LOG = logging.getLogger("conch")


class NameLocks:
    """A lock per model, kept as long as somebody holds it or waits for it.

    An ensemble's is held while its members load under theirs; cycles of ensembles are refused
    before anything waits.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: The members of the ensembles that are being loaded, in whatever operation.
        self.members: dict[str, set[str]] = {}

    def of(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


class RunningLoads:
    """The loads that have not ended, whose callers may have gone: they can be given up by whoever stops the server or
    unloads the model."""

    def __init__(self) -> None:
        self._names: dict[asyncio.Task[None], str] = {}
        self._reasons: WeakKeyDictionary[asyncio.Task[None], str] = WeakKeyDictionary()

    def add(self, name: str, task: asyncio.Task[None]) -> None:
        self._names[task] = name
        task.add_done_callback(self._names.pop)

    def includes(self, name: str) -> bool:
        """Whether a load of the model has not ended."""
        return name in self._names.values()

    def give_up(self, reason: str, name: str | None = None) -> list[asyncio.Task[None]]:
        """Cancel the loads of one model, or all; their callers are told ``reason``.  Returns their tasks."""
        tasks = [task for task, loading in self._names.items() if name in (None, loading)]
        for task in tasks:
            self._reasons[task] = reason
            task.cancel()
        return tasks

    def reason(self, task: asyncio.Task[None]) -> str:
        """Why a load was given up."""
        return self._reasons.get(task, "")


async def _shielded(task: asyncio.Task[None]) -> None:
    """Wait for a task, which goes on if the caller is cancelled; its error, which has been logged, is then ignored."""
    task.add_done_callback(_retrieve)
    outer = asyncio.shield(task)
    outer.add_done_callback(_retrieve)
    await outer


def _retrieve(task: asyncio.Future[None]) -> None:
    """Retrieve the error of a task that no caller may await any more."""
    if not task.cancelled():
        task.exception()


class _CircularDependencyError(ConchError):
    """A load of an ensemble that is a member of itself; ``cycle`` are the ensembles that contain each other."""

    def __init__(self, name: str, cycle: tuple[str, ...]) -> None:
        self.cycle = cycle
        self.problem = circular_dependency(name, cycle)
        super().__init__(f"load failed for model '{name}': {self.problem.message}\n", self.problem.code)


class LoadOperation:
    """Loads what is ``wanted``, with ``override`` in place of its files where that is given.

    A load goes on when nobody waits for it any more; ``running`` is told of it.
    """

    def __init__(
        self,
        repository: ModelRepository,
        loader: Loader,
        table: ModelTable,
        rollout: Rollout,
        locks: NameLocks,
        wanted: frozenset[str],
        override: Override | None,
        running: RunningLoads,
    ) -> None:
        self._repository = repository
        self._loader = loader
        self._table = table
        self._rollout = rollout
        self._locks = locks
        self._wanted = wanted
        self._override = override
        self._running = running
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str) -> None:
        """Load a model, or wait for its load if this operation has begun it."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.get_running_loop().create_task(self._load_locked(name))
            self._running.add(name, task)
        try:
            await _shielded(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise unavailable(f"load failed for model '{name}': {self._running.reason(task)}") from None
            raise

    async def _load_locked(self, name: str) -> None:
        async with self._locks.of(name):
            try:
                await self._load(name)
            finally:
                self._locks.members.pop(name, None)

    async def _load(self, name: str) -> None:
        override = self._override if name in self._wanted else None
        model_state = self._table.models.get(name)
        if model_state is not None:
            model_state.wanted = model_state.wanted or name in self._wanted
            if not override and not model_state.members and await self._is_unchanged(model_state):
                return
        uploaded: UploadedModel | None = None
        try:
            files, uploaded = await self._files(name, override)
            config = self._configure(files)
            if override and not override.of_any_code:
                written = self._configure(await self._repository.described(name))
                serving = model_state.config if model_state is not None else None
                versions = model_state.models() if model_state is not None else []
                known = [written, *([serving] if serving else []), *(model.config for model in versions)]
                check_same_code(config, known)
            steps = await self._load_members(name, config)
            if is_ensemble(config):
                self._check_members(config, steps)
            if model_state is None:
                model_state = ModelState(name, config=config, wanted=name in self._wanted, steps=steps)
                self._table.models[name] = model_state
                self._table.forget_unloaded(lambda other: self._locks.of(other).locked())
            elif not override and await self._is_unchanged(model_state):
                return
            await self._rollout.bring_up(model_state, files, config, uploaded, bool(override), steps)
        except BaseException as error:
            if uploaded is not None:
                await asyncio.to_thread(uploaded.close)
            if isinstance(error, PollError):
                LOG.error("%s", error.log)
                if isinstance(error, NotUniqueError) and model_state is None:
                    self._table.models[name] = ModelState(name, poll_reason=error.index_reason)
            raise

    async def _files(self, name: str, override: Override | None) -> tuple[ModelFiles, UploadedModel | None]:
        if not override:
            return await self._repository.described(name), None
        backends, naming = self._repository.backends, self._repository.naming
        plain, namespace = naming.name(name), naming.namespace(name)
        brought = bool(override.files) or await self._repository.aside(partial(self._has_no_directory, name, override))
        if brought:
            uploaded = await asyncio.to_thread(UploadedModel, plain, override.files)
            try:
                return await asyncio.to_thread(
                    describe_override, plain, uploaded.directory, override.config, backends, namespace
                ), uploaded
            except BaseException:
                await asyncio.to_thread(uploaded.close)
                raise
        written = await asyncio.to_thread(read_override, plain, override.config)
        return await self._repository.described(name, written), None

    def _has_no_directory(self, name: str, override: Override) -> bool:
        """Whether the model of a load is in no repository, and need not be; blocking."""
        if not needs_no_directory(override):
            return False
        try:
            self._repository.check_unique(name)
        except NotFoundError:
            return True
        return False

    async def _load_members(self, name: str, config: ModelConfig) -> dict[str, str]:
        """Load the models that the steps of an ensemble name; returns their keys by name."""
        if not is_ensemble(config):
            return {}
        steps = await self._repository.aside(partial(self._repository.members, config, name))
        members = set(steps.values())
        self._locks.members[name] = members
        cycle = cycle_of(name, self._locks.members)
        if not cycle:
            # What does not load is reported by the ensemble's own validation.
            results = await asyncio.gather(*(self.load(member) for member in sorted(members)), return_exceptions=True)
            cycles = (result.cycle for result in results if isinstance(result, _CircularDependencyError))
            cycle = next((found for found in cycles if name in found), ())
        if cycle:
            error = _CircularDependencyError(name, cycle)
            LOG.error("%s", error.problem.status)
            raise error
        return steps

    def _check_members(self, config: ModelConfig, steps: Mapping[str, str]) -> None:
        """Refuse an ensemble that does not fit its members; it is then as if it were not there."""
        try:
            self._loader.check_ensemble(config, self._rollout.step_models(config, steps))
        except ConchError as error:
            LOG.error("%s", error.status)
            message = f"load failed for model '{config.name}': {error.message}\n"
            raise ConchError(message, Code.INVALID_ARG, public=without_directories(message)) from error

    def _configure(self, files: ModelFiles) -> ModelConfig:
        try:
            return self._loader.configure(files)
        except PollError:
            raise
        except ConchError as error:
            raise PollError.of(files.name, error) from error

    async def _is_unchanged(self, model_state: ModelState) -> bool:
        """Whether a model serves just what its directory holds; as a member that nobody asked for here, also whether it
        serves what a load of its own brought, and its directory has not changed since."""
        if not model_state.versions or (model_state.overridden and model_state.name in self._wanted):
            return False
        if any(version_state.state is not State.READY for version_state in model_state.versions.values()):
            return False
        if model_state.fingerprint is None and model_state.uploaded is None:
            return False
        external = [model.external for model in model_state.models()]

        def look() -> bool:
            fingerprint = model_state.fingerprint
            if fingerprint is not None and self._repository.fingerprint(model_state.name) != fingerprint:
                return False
            return all(take_external(files) == files for files in external)

        try:
            return await self._repository.aside(look)
        except (ConchError, OSError):
            return False


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
        await self.complete(self._load(name, override))

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

    async def complete(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a load or an unload to its end, even if the caller is cancelled; :meth:`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        await _shielded(task)

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
                    self._loader.check_ensemble(model.config, self._rollout.step_models(model.config, model.steps))
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
