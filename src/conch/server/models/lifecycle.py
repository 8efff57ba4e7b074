"""Loads, reloads and unloads models, and keeps the table of their states.

Runs on the event loop; disks are read in threads. A load starts new versions, then swaps them in; the replaced versions
serve until then and end after their last request. Loads and unloads of a model hold its lock, so that different models
load concurrently.
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
from conch.core.errors import Code, ConchError, unavailable
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

LOG = logging.getLogger("conch")


class NameLocks:
    """A lock per model, kept while it is held or waited for.

    An ensemble's lock is held while the models of its steps load under theirs; cycles of ensembles are refused before
    any wait.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Models in the steps of ensembles that are being loaded, by any operation.
        self.members: dict[str, set[str]] = {}

    def of(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


class RunningLoads:
    """The loads in progress, possibly without a caller; they are cancelled by an unload or when the server stops."""

    def __init__(self) -> None:
        self._names: dict[asyncio.Task[None], str] = {}
        self._reasons: WeakKeyDictionary[asyncio.Task[None], str] = WeakKeyDictionary()

    def add(self, name: str, task: asyncio.Task[None]) -> None:
        self._names[task] = name
        task.add_done_callback(self._names.pop)

    def includes(self, name: str) -> bool:
        """Whether a load of the model is in progress."""
        return name in self._names.values()

    def give_up(self, reason: str, name: str | None = None) -> list[asyncio.Task[None]]:
        """Cancel the loads of one model, or all; their callers get ``reason`` as an error. Returns their tasks."""
        tasks = [task for task, loading in self._names.items() if name in (None, loading)]
        for task in tasks:
            self._reasons[task] = reason
            task.cancel()
        return tasks

    def reason(self, task: asyncio.Task[None]) -> str:
        """Return why a load was cancelled."""
        return self._reasons.get(task, "")


async def _shielded(task: asyncio.Task[None]) -> None:
    """Wait for a task, which continues if the caller is cancelled; its error, already logged, is then ignored."""
    task.add_done_callback(_retrieve)
    outer = asyncio.shield(task)
    outer.add_done_callback(_retrieve)
    await outer


def _retrieve(task: asyncio.Future[None]) -> None:
    """Retrieve the error of a task that may have no caller any more, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


class _CircularDependencyError(ConchError):
    """Failure to load an ensemble that contains itself; ``cycle`` has the ensembles that contain each other."""

    def __init__(self, name: str, cycle: tuple[str, ...]) -> None:
        self.cycle = cycle
        self.problem = circular_dependency(name, cycle)
        super().__init__(f"load failed for model '{name}': {self.problem.message}\n", self.problem.code)


class LoadOperation:
    """Loads the ``wanted`` models and the models of their steps; ``override`` replaces the files of a wanted model.

    A load continues without callers; it is registered in ``running``.
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
                LOG.error("%s", error.message)
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
        """Whether the model of a load is in no repository and need not be; blocking."""
        if not needs_no_directory(override):
            return False
        try:
            self._repository.check_unique(name)
        except NotFoundError:
            return True
        return False

    async def _load_members(self, name: str, config: ModelConfig) -> dict[str, str]:
        """Load the models in an ensemble's steps; return their keys by name."""
        if not is_ensemble(config):
            return {}
        steps = await self._repository.aside(partial(self._repository.members, config, name))
        members = set(steps.values())
        self._locks.members[name] = members
        cycle = cycle_of(name, self._locks.members)
        if not cycle:
            # Failed loads are reported by the validation of the ensemble.
            results = await asyncio.gather(*(self.load(member) for member in sorted(members)), return_exceptions=True)
            cycles = (result.cycle for result in results if isinstance(result, _CircularDependencyError))
            cycle = next((cycle for cycle in cycles if name in cycle), ())
        if cycle:
            error = _CircularDependencyError(name, cycle)
            LOG.error("%s", error.problem.status)
            raise error
        return steps

    def _check_members(self, config: ModelConfig, steps: Mapping[str, str]) -> None:
        """Raise INVALID_ARG if an ensemble does not fit the models of its steps."""
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
        """Whether all versions of a model serve and their files have not changed since they were loaded.

        An override counts as a change if the model is now loaded by name, but not if it is loaded as a step of an
        ensemble.
        """
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


#: Timeout for the unload of the models in an ensemble's steps, if the ensemble has no requests left (s).
_PROMPT_SECONDS = 0.5


class Lifecycle:
    """Loads and unloads models; the only writer of the model table."""

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
        """Load several models; return the errors of failed loads by name."""
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
        """Load or reload a model and, for an ensemble, the models of its steps that are not loaded yet.

        Raises the error of a failed load; the previous versions then continue to serve. The load continues if the
        caller is cancelled.
        """
        self._refuse_if_closed()
        await self.complete(self._load(name, override))

    async def _load(self, name: str, override: Override | None) -> None:
        await self._operation(frozenset([name]), override).load(name)
        self._revalidate([name])
        await self._restore([name])

    async def load_named(self, name: str, override: Override | None = None) -> None:
        """Load the model with a name, or all models with it in several repositories; raises as :meth:`load` does.

        Raises INVALID_ARG for an override if several models have the name.
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
        """Unload all models with a name."""
        for key in self._table.keys(name) or [name]:
            await self.unload(key, dependents)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model and cancel its load, if any; returns while its last requests still run.

        ``dependents``: also unload the models of an ensemble's steps that were not loaded by name and that no other
        ensemble needs.
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
            task = asyncio.get_running_loop().create_task(self._unload_step_models(name, members))
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
        """Return, by model, the files outside of its directory that its versions were loaded from."""
        return {
            name: dict(chain.from_iterable(model.external.items() for model in model_state.models()))
            for name, model_state in self._table.models.items()
        }

    def is_loading(self, name: str) -> bool:
        """Whether a load of the model is in progress, which an unload would cancel."""
        return self._loading.includes(name)

    async def retired(self, name: str) -> None:
        """Wait until the versions of a model that were replaced or unloaded before this call have ended."""
        await self._rollout.retired(name)

    async def close(self) -> None:
        """Cancel loads in progress and refuse further ones; models that serve are not unloaded."""
        self._closed = True
        tasks = [*self._loading.give_up("the server is stopping"), *self._unloading, *self._finishing]
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise unavailable("the server is stopping and loads no models")

    async def _unload_step_models(self, ensemble: str, members: set[str]) -> None:
        """After the last request of an ensemble, unload the models of its steps that are not needed otherwise."""
        await self._rollout.retired(ensemble)
        for member in sorted(members):
            async with self._locks.of(member):
                model_state = self._table.models.get(member)
                if model_state is not None and not model_state.wanted and not self._is_step_model(member):
                    self._rollout.retire_all(model_state)

    def _is_step_model(self, name: str) -> bool:
        """Whether an ensemble that serves, or is being loaded, has this model in a step."""
        serving = (state.members for state in self._table.models.values() if state.ready_versions())
        return any(name in members for members in (*serving, *self._locks.members.values()))

    def _operation(self, wanted: frozenset[str], override: Override | None = None) -> LoadOperation:
        return LoadOperation(
            self._repository, self._loader, self._table, self._rollout, self._locks, wanted, override, self._loading
        )

    def _revalidate(self, changed: Iterable[str]) -> None:
        """Validate the ensembles with ``changed`` models in their steps; those that no longer fit stop serving."""
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
        """Load ensembles again whose missing step models are back; not ensembles that were unloaded."""
        names = set(loaded)
        for ensemble in list(self._table.models.values()):
            if not ensemble.members & names or not ensemble.is_disabled:
                continue
            async with self._locks.of(ensemble.name):
                restored = ensemble.is_disabled and await self._rollout.restore(ensemble)
            if restored:
                await self._restore([ensemble.name])
