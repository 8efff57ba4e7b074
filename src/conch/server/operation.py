"""One load of one or several models: members before their ensembles, each model once.

Made by the lifecycle for every call; runs on the event loop and reads disks in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

from conch.config.schema import ModelConfig, is_ensemble
from conch.config.validate_ensemble import circular_dependency, cycle_of
from conch.errors import Code, ConchError, unavailable
from conch.repository.errors import NotFoundError, NotUniqueError, PollError, without_directories
from conch.repository.fingerprint import take_external
from conch.repository.model_files import ModelFiles
from conch.repository.override import (
    Override,
    UploadedModel,
    describe_override,
    needs_no_directory,
    read_override,
)
from conch.repository.scan import ModelRepository
from conch.server.loading import Loader
from conch.server.overrides import check_same_code
from conch.server.rollout import Rollout
from conch.server.states import ModelState, ModelTable, State

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
        task.add_done_callback(_retrieve)

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


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a load, which has been logged, as the caller may have been cancelled."""
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
            await asyncio.shield(task)
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
            self._loader.check_ensemble(config, self._rollout.members_of(config, steps))
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
