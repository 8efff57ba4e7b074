"""Loads, reloads and unloads models; the only writer of the model table.

A load of a model is one task; its steps are in ``model_loader.py``. The task continues if its caller is cancelled; only
an unload of the model and the end of the server cancel it. Loads and unloads of a model hold its lock; different models
load concurrently. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from conch.core.errors import ConchError, unavailable
from conch.repository.errors import without_directories
from conch.repository.fingerprint import ExternalFiles
from conch.repository.override import Override
from conch.server.models.model_loader import LoadRequest, ModelLoader
from conch.server.models.states import State, ambiguous

LOG = logging.getLogger("conch")

T = TypeVar("T")

#: Timeout for the unload of the models in an ensemble's steps, if the ensemble has no requests left (s).
_PROMPT_SECONDS: Final = 0.5


@dataclass(eq=False, slots=True)
class RunningLoad:
    """A load of a model in progress, possibly without a caller."""

    name: str
    task: asyncio.Task[None]
    #: Why it was cancelled.
    reason: str = ""

    def cancel(self, reason: str) -> None:
        self.reason = reason
        self.task.cancel()

    @property
    def error(self) -> BaseException | None:
        """The error of a load that has ended: UNAVAILABLE if it was cancelled, None if it succeeded."""
        if self.task.cancelled():
            return unavailable(f"load failed for model '{self.name}': {self.reason}")
        return self.task.exception()


class Lifecycle:
    """Loads and unloads models; ``models`` loads one model."""

    def __init__(self, models: ModelLoader) -> None:
        self.versions = models.versions
        self._models = models
        self._repository = models.repository
        self._table = models.table
        # An ensemble's lock is held while the models of its steps load under theirs; cycles of ensembles are refused
        # before any wait. A lock lives while it is held or waited for.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads: set[RunningLoad] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._step_unloads: set[asyncio.Task[None]] = set()
        self._closed = False

    # Called by the server

    async def load_all(
        self, names: Iterable[str], override: Override | None = None, *, by_model: bool = False
    ) -> dict[str, ConchError]:
        """Load or reload models and the models of their steps; return the errors of failed loads by name.

        The previous versions of a model whose load fails continue to serve. The loads continue if the caller is
        cancelled. ``by_model``: a model requests the load.
        """
        self._refuse_if_closed()
        return await self.complete(self._load_all(LoadRequest(frozenset(names), override, by_model)))

    async def load(self, name: str, override: Override | None = None, *, by_model: bool = False) -> None:
        """Load or reload a model as :meth:`load_all` does; raises the error of a failed load."""
        failed = await self.load_all([name], override, by_model=by_model)
        if failed:
            raise failed[name]

    async def load_named(self, name: str, override: Override | None = None, *, by_model: bool = False) -> None:
        """Load the model with a name, or all models with it in several repositories; raises as :meth:`load` does.

        Raises INVALID_ARG for an override if several models have the name.
        """
        if not self._table.naming:
            await self.load(name, override, by_model=by_model)
            return
        in_repository = await self._repository.in_thread(partial(self._repository.keys, name))
        keys = in_repository or self._table.keys(name) or [name]
        if override and len(keys) > 1:
            raise ambiguous(name, len(keys))
        for key in keys:
            await self.load(key, override, by_model=by_model)

    async def unload_named(self, name: str, dependents: bool = False) -> None:
        """Unload all models with a name."""
        for key in self._table.keys(name) or [name]:
            await self.unload(key, dependents)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model and cancel its load, if any; returns while its last requests still run.

        ``dependents``: also unload the models of an ensemble's steps that were not loaded by name and that no other
        ensemble needs.
        """
        for load in self._loads:
            if load.name == name:
                load.cancel("the model was unloaded during the load")
        async with self._lock(name):
            model_state = self._table.models.get(name)
            if model_state is None:
                return
            step_keys = model_state.step_keys
            model_state.wanted = False
            self.versions.unload_model(model_state)
            self._revalidate([name])
        if dependents:
            task = asyncio.get_running_loop().create_task(self._unload_step_models(name, step_keys))
            self._step_unloads.add(task)
            task.add_done_callback(self._step_unloads.discard)
            await asyncio.wait([task], timeout=_PROMPT_SECONDS)

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a load or an unload to its end, even if the caller is cancelled; :meth:`close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(_retrieve)
        await asyncio.wait([task])
        return task.result()

    def external_files(self) -> dict[str, ExternalFiles]:
        """Return, by model, the files outside of its directory that its versions were loaded from."""
        return {
            name: dict(chain.from_iterable(model.external.items() for model in model_state.models()))
            for name, model_state in self._table.models.items()
        }

    def is_loading(self, name: str) -> bool:
        """Whether a load of the model is in progress, which an unload would cancel."""
        return any(load.name == name for load in self._loads)

    async def close(self) -> None:
        """Cancel loads in progress and refuse further ones; models that serve are not unloaded."""
        self._closed = True
        tasks = [*(load.task for load in self._loads), *self._step_unloads, *self._calls]
        for load in self._loads:
            load.cancel("the server is stopping")
        for task in self._step_unloads:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise unavailable("the server is stopping and loads no models")

    # Loads

    async def _load_all(self, request: LoadRequest) -> dict[str, ConchError]:
        self._table.forget_unloaded(lambda name: self._lock(name).locked())
        failed: dict[str, ConchError] = {}
        for name, error in (await self._load_models(request.names, request, {})).items():
            if not isinstance(error, ConchError):  # the other models load all the same
                LOG.error("failed to load '%s'", name, exc_info=error)
                message = f"load failed for model '{name}': {error!r}"
                error = ConchError(message, public=without_directories(message))
            failed[name] = error
        loaded = request.names - failed.keys()
        self._revalidate(loaded)
        await self._restore(loaded, request.by_model)
        return failed

    async def _load_models(
        self, names: Iterable[str], request: LoadRequest, loads: dict[str, RunningLoad]
    ) -> dict[str, BaseException]:
        """Load models concurrently; return the errors of failed loads by name.

        ``loads`` are those that the request has started. They continue if this call is cancelled.
        """
        names = sorted(names)
        for name in names:
            if name not in loads:
                self._refuse_if_closed()
                loads[name] = self._start_load(name, request, loads)
        if names:
            await asyncio.wait([loads[name].task for name in names])
        return {name: error for name in names if (error := loads[name].error) is not None}

    def _start_load(self, name: str, request: LoadRequest, loads: dict[str, RunningLoad]) -> RunningLoad:
        async def load_locked() -> None:
            async with self._lock(name):
                await self._models.load_model(name, request, partial(self._load_models, request=request, loads=loads))

        load = RunningLoad(name, asyncio.get_running_loop().create_task(load_locked()))
        self._loads.add(load)
        load.task.add_done_callback(lambda task: self._loads.discard(load))
        load.task.add_done_callback(_retrieve)
        return load

    # Ensembles after loads and unloads of their steps

    def _revalidate(self, changed: Iterable[str]) -> None:
        """Validate the ensembles with ``changed`` models in their steps; those that no longer fit stop serving."""
        names = set(changed)
        for ensemble in list(self._table.models.values()):
            if ensemble.name in names or not ensemble.step_keys & names or not ensemble.models():
                continue
            for version, version_state in list(ensemble.versions.items()):
                model = version_state.model
                if version_state.state is not State.READY or model is None:
                    continue
                try:
                    self._models.version_loader.check_ensemble(model.config, model.steps)
                except ConchError as error:
                    LOG.error("failed to load '%s' version %d: %s", ensemble.name, version, error.status)
                    self.versions.end(model)
                    version_state.make_unavailable(error.public_status)
                    self._revalidate([ensemble.name])

    async def _restore(self, loaded: Iterable[str], by_model: bool) -> None:
        """Load ensembles again whose missing step models are back; not ensembles that were unloaded."""
        names = set(loaded)
        for ensemble in list(self._table.models.values()):
            if not ensemble.step_keys & names or not ensemble.is_disabled:
                continue
            async with self._lock(ensemble.name):
                restored = ensemble.is_disabled and await self._models.restore_ensemble(ensemble, by_model)
            if restored:
                await self._restore([ensemble.name], by_model)

    async def _unload_step_models(self, ensemble: str, step_keys: set[str]) -> None:
        """After the last request of an ensemble, unload the models of its steps that are not needed otherwise."""
        await self.versions.wait(ensemble)
        for key in sorted(step_keys):
            async with self._lock(key):
                model_state = self._table.models.get(key)
                if model_state is not None and not model_state.wanted and not self._is_step_model(key):
                    self.versions.unload_model(model_state)

    def _is_step_model(self, name: str) -> bool:
        """Whether an ensemble that serves, or is being loaded, has this model in a step."""
        serving = (state.step_keys for state in self._table.models.values() if state.ready_versions())
        return any(name in step_keys for step_keys in (*serving, *self._models.loading_steps.values()))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that may have no caller any more, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()
