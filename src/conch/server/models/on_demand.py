"""Loads models on demand: requests wait until their model is loaded, and idle models are evicted to make room.

Owned by the server in ``--model-control-mode=on-demand``; runs on the event loop. The state machine
:class:`conch.server.models.eviction.OnDemandPlanner` makes the decisions; this module reports events to it and
carries out its decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any

from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, invalid, not_found, one_line
from conch.core.inference import ModelSignature
from conch.machine.memory import read_size, usable_memory
from conch.options.settings import Settings
from conch.repository.errors import NotFoundError, NotUniqueError, PollError, without_directories
from conch.repository.model_files import ModelFiles
from conch.repository.names import is_directory_name
from conch.repository.scan import ModelRepository
from conch.repository.versions import select_versions
from conch.server.model import Model
from conch.server.models.capacity import (
    Capacity,
    CapacityLimits,
    Decision,
    Evict,
    Footprint,
    Footprints,
    Load,
    Phase,
    ReadFootprints,
    ResumeRequest,
    Waiter,
)
from conch.server.models.eviction import OnDemandPlanner
from conch.server.models.lifecycle import Lifecycle
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import ModelTable
from conch.telemetry.exposition import Family
from conch.telemetry.memory import total_memory
from conch.telemetry.on_demand import families

LOG = logging.getLogger("conch")

#: Interval between measurements of the loaded models (s).
_MEASURE_SECONDS = 5.0


class LoadNeeded(ConchError):
    """The model of a request is not loaded yet; the caller can wait for its load."""

    def __init__(self, name: str, demand: OnDemand) -> None:
        super().__init__(f"model '{name}' is not loaded", Code.UNAVAILABLE)
        self._name = name
        self._demand = demand

    def then(self, proceed: Callable[[ConchError | None], None], *, caller: str | None = None) -> Callable[[], None]:
        """Call ``proceed`` once when the model serves, or with the error; returns a function to stop waiting.

        Without an error, ``proceed`` can repeat the call that raised this. ``caller`` is the model that sends the
        request, empty if that is unknown; it may itself be loading.
        """
        return self._demand.wait(self._name, proceed, caller=caller)

    async def wait(self, *, caller: str | None = None) -> None:
        """Wait until the model is loaded; raises the error of a failed load. ``caller`` as for :meth:`then`."""
        ended: asyncio.Future[ConchError | None] = asyncio.get_running_loop().create_future()
        stop_waiting = self.then(lambda error: None if ended.done() else ended.set_result(error), caller=caller)
        try:
            error = await ended
        finally:
            stop_waiting()
        if error is not None:
            raise error


class LoadFootprints:
    """Determines the footprints of models in a repository; ``gpus`` are used to complete configurations."""

    def __init__(self, repository: ModelRepository, ledger: MemoryLedger, gpus: tuple[int, ...] = ()) -> None:
        self._repository = repository
        self._ledger = ledger
        self._gpus = gpus

    async def of(self, name: str) -> Footprints:
        """Return the footprints of a load of ``name``: of the model and, recursively, the models of its steps.

        Raises :class:`PollError` if the model does not exist or cannot be read, so that no other model is evicted for
        it. Other problems of a model are reported by its load.
        """
        footprints: dict[str, Footprint] = {}
        waiting = [name]
        while waiting:
            model = waiting.pop()
            if model in footprints:
                continue
            try:
                files = await self._repository.described(model)
                footprints[model] = await self._footprint(files)
            except (ConchError, OSError, ValueError) as error:
                if model == name and isinstance(error, PollError) and not isinstance(error, NotUniqueError):
                    raise
                if not isinstance(error, NotFoundError):
                    footprints[model] = Footprint(Capacity(models=1))
            else:
                waiting += footprints[model].step_models
        return footprints

    async def _footprint(self, files: ModelFiles) -> Footprint:
        step_models = _step_models(files.config)
        if step_models:
            return Footprint(Capacity(), step_models)
        config = files.completed(self._gpus)
        versions = select_versions(config, files.versions).versions
        memory = await self._ledger.expected(files, versions, config)
        return Footprint(Capacity(models=1, memory=memory.host))

    def measured(self, models: Sequence[Model]) -> Footprint:
        """Return the footprint of the loaded versions of one model."""
        step_models = frozenset[str]().union(*(_step_models(model.config) for model in models))
        if step_models:
            return Footprint(Capacity(), step_models)
        return Footprint(Capacity(models=1, memory=total_memory(model.statistics.memory for model in models).host))

    async def remeasure(self) -> None:
        """Measure all loaded models."""
        await self._ledger.measure()


class OnDemand:
    """Loads requested models within ``limits``, and evicts idle models.

    ``pinned`` models are never evicted. ``clock`` is monotonic, in seconds; it is the clock of ``Model.last_ended``.
    """

    def __init__(
        self,
        limits: CapacityLimits,
        pinned: tuple[str, ...],
        repository: ModelRepository,
        table: ModelTable,
        lifecycle: Lifecycle,
        footprints: LoadFootprints,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.planner = OnDemandPlanner(limits, self, pinned)
        self._repository = repository
        self._table = table
        self._lifecycle = lifecycle
        self._footprints = footprints
        self._clock = clock
        #: Names of the models in the repository when it was last read.
        self.known: frozenset[str] = frozenset()
        #: The signatures of models when they were last loaded.
        self.signatures: dict[str, ModelSignature] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        table.on_ready = self._decide  # immediate, so that waiting requests run before later requests

    # Called by the server

    def start(self, poll_seconds: float) -> None:
        """Start updating the list of models (every ``poll_seconds``) and their measurements."""
        self._run(_regularly(self.refresh, poll_seconds, "read the model repository"))
        self._run(_regularly(self._measure, _MEASURE_SECONDS, "measure the memory of the loaded models"))

    def needed(self, name: str, missing: ConchError) -> ConchError:
        """The error for a request to a model that was not found.

        It is ``missing`` if no load can help, a refusal if the request may not wait, otherwise :class:`LoadNeeded`.
        """
        starting = self._table.starting
        if starting is None or name in starting or not is_directory_name(name) or self._serves(name):
            return missing  # a model that serves does not have the requested version
        return self.planner.refusal(name, self._clock()) or LoadNeeded(name, self)

    def wait(
        self, name: str, proceed: Callable[[ConchError | None], None], *, caller: str | None = None
    ) -> Callable[[], None]:
        """Call ``proceed`` when the model serves, or with the error; returns a function to stop waiting."""
        waiter = self.planner.ask(name, proceed, self._clock(), caller=caller)
        self._schedule()
        return partial(self._withdraw, waiter)

    async def load(self, name: str, parameters: Mapping[str, object], *, by_model: bool = False) -> None:
        """Load a model by name, or reload it if its files have changed; ``by_model`` if a model requests it.

        Afterwards, the model serves files that were read after the call.

        Raises INVALID_ARG for ``parameters``: an evicted model is always reloaded from the repository.
        """
        if parameters:
            raise invalid(
                f"model '{name}' is loaded on demand, from the repository alone: a configuration and files can be sent "
                "with --model-control-mode=explicit"
            )
        await self._repository.in_thread(partial(self._repository.check_unique, name))
        self.planner.back_off.forget(name)
        if self._serves(name) and self.planner.phase(name) is not Phase.LEAVING:
            try:
                await self._lifecycle.load(name, by_model=by_model)
            finally:
                self._schedule()
            return
        refusal = self.planner.refusal(name, self._clock())
        if refusal is not None:
            raise refusal
        joined = self.planner.phase(name) is Phase.LOADING  # a load that may have read older files
        try:
            await LoadNeeded(name, self).wait(caller="" if by_model else None)
        except ConchError:
            failed = self.planner.back_off.refusal(name, self._clock()) is not None
            if not (joined and failed):
                raise
        if joined:
            await self.load(name, parameters, by_model=by_model)

    async def unload(self, name: str, dependents: bool) -> None:
        """Unload a model by name, even if it is pinned; the next request loads it again."""
        if self._lifecycle.is_loading(name):
            self.planner.unloaded_during_load(name, self._clock())
            self._schedule()
        await self._lifecycle.unload(name, dependents)
        if self.planner.phase(name) is Phase.LEAVING:
            self._run(self._await_unload(name))
        self._schedule()

    def can_serve(self, name: str) -> bool:
        """Whether a request for a model that is not loaded would probably wait for a load."""
        fails = self.planner.back_off.refusal(name, self._clock())
        return not self._closed and name in self.known and fails is None

    def families(self) -> Iterable[Family]:
        """The metric families of loading on demand."""
        loaded = len(self.planner.residents(Phase.LOADED))
        return families(self.planner.counts, loaded, self.planner.waiting())

    async def refresh(self) -> None:
        """Read the names of the models in the repository."""
        self.known = frozenset(await self._repository.listed())

    async def close(self) -> None:
        """Fail waiting requests; the lifecycle ends the loads in progress."""
        self._closed = True
        self.planner.close("the server is stopping and loads no models", self._clock())
        self._decide()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Called by the state machine

    def busy(self, name: str) -> bool:
        """Whether requests use the model, or it is being reloaded, which its eviction would cancel."""
        return self._lifecycle.is_loading(name) or any(model.in_use for model in self._models(name))

    def last_used(self, name: str) -> float:
        return max((model.last_ended / 1e9 for model in self._models(name)), default=0.0)

    # Makes and carries out decisions

    def _schedule(self) -> None:
        """Decide in the next event loop iteration, when the requests of current callbacks are in flight."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._scheduled = False
        self._reconcile()
        now = self._clock()
        while decisions := self.planner.decide(now):
            for decision in decisions:
                self._carry_out(decision)
        if warning := self.planner.thrashing.warning(now):
            LOG.warning("%s", warning)
        self._set_timer(now)
        self._watch_for_idle()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case ReadFootprints(name):
                self._run(self._plan(name))
            case Load():
                self._run(self._load(decision))
            case Evict(name, reason):
                LOG.info("unloading '%s' %s", name, reason)
                self._run(self._unload(name))
            case ResumeRequest(waiter, error):
                if not waiter.withdrawn:
                    self._proceed(waiter, error)

    def _reconcile(self) -> None:
        """Report models to the state machine that were loaded or unloaded by other means."""
        for name in self.planner.residents(Phase.LOADED):
            if not self._serves(name):
                self.planner.leaves(name)
                self._run(self._await_unload(name))
        for name in self._table.models:
            if self.planner.phase(name) in (None, Phase.LOADING) and self._serves(name):
                self.planner.serves(name, self._need(name), self._clock())
                self.signatures[name] = self._models(name)[-1].signature

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self.planner.wake_at(now)
        if wake_at is not None and not self._closed:
            self._timer = self._loop.call_later(max(wake_at - now, 0.0), self._decide)

    def _watch_for_idle(self) -> None:
        """Decide again when a busy model becomes idle, if another model waits for capacity."""
        if self._watch is not None or not self.planner.blocked or self._closed:
            return
        loaded = (name for name in self.planner.residents(Phase.LOADED) if name not in self.planner.pinned)
        busy = [model for name in loaded for model in self._models(name) if model.in_use]
        if busy:
            self._watch = self._run(self._wait_for_idle(busy))

    async def _wait_for_idle(self, busy: list[Model]) -> None:
        waiting = [self._loop.create_task(model.drain()) for model in busy]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            self._watch = None
        self._schedule()

    async def _plan(self, name: str) -> None:
        try:
            self.planner.planned(name, await self._footprints.of(name))
        except NotFoundError:
            error = not_found(f"Request for unknown model: '{name}' is not found")
            self.planner.unknown(name, error, self._clock())
        except Exception as error:
            if isinstance(error, PollError):
                LOG.error("%s", error.message)
            self.planner.unreadable(name, _failure(name, error), self._clock())
        self._schedule()

    async def _load(self, load: Load) -> None:
        try:
            await self._lifecycle.load(load.name, by_model=load.by_model)
        except Exception as error:
            self.planner.failed(load, _failure(load.name, error), self._clock())
        else:
            self.planner.loaded(load)
        self._decide()

    async def _unload(self, name: str) -> None:
        try:
            await self._lifecycle.unload(name)
        finally:
            await self._await_unload(name)

    async def _await_unload(self, name: str) -> None:
        await self._lifecycle.versions.wait(name)
        self.planner.left(name)
        self._schedule()

    def _proceed(self, waiter: Waiter, error: ConchError | None) -> None:
        """Resume a request and keep its model loaded until the request holds it."""
        with ExitStack() as holds:
            if error is None:
                for model in self._models(waiter.name):
                    holds.enter_context(model.held())
            self._loop.call_soon(self._loop.call_soon, holds.pop_all().close)
        try:
            waiter.proceed(None if error is None else _again(error))
        except Exception:
            LOG.exception("a request for '%s' could not continue after its model was loaded", waiter.name)

    def _withdraw(self, waiter: Waiter) -> None:
        self.planner.withdraw(waiter)
        self._schedule()

    # State of models

    def _models(self, name: str) -> list[Model]:
        model_state = self._table.models.get(name)
        return [] if model_state is None else model_state.models()

    def _serves(self, name: str) -> bool:
        model_state = self._table.models.get(name)
        return model_state is not None and bool(model_state.ready_versions())

    def _need(self, name: str) -> Footprint:
        """The footprint of a model that serves."""
        return self._footprints.measured(self._models(name))

    async def _measure(self) -> None:
        await self._footprints.remeasure()
        for name in self.planner.residents(Phase.LOADED):
            if self._serves(name):
                self.planner.measured(name, self._need(name).capacity)
        self._schedule()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("loading on demand failed", exc_info=error)


def on_demand_limits(settings: Settings) -> CapacityLimits:
    """The capacity limits from the command line options."""
    return CapacityLimits(
        capacity=Capacity(settings.max_loaded_models, read_size(settings.memory_budget, usable_memory())),
        min_loaded=settings.min_loaded_secs,
        wait=settings.load_wait_secs,
        waiting=settings.max_load_waiting,
        waiting_per_model=settings.max_load_waiting_per_model,
    )


def _again(error: ConchError) -> ConchError:
    """Copy an error for each caller that raises it: a traceback keeps the caller's variables alive."""
    return error.prefixed("")


def _failure(name: str, error: Exception) -> ConchError:
    """The error for requests after a failed load; an unexpected error is also logged."""
    if isinstance(error, ConchError):
        public = without_directories(error.public.strip())
        return ConchError(error.message.strip(), Code.UNAVAILABLE, public=public)
    LOG.error("failed to load '%s'", name, exc_info=error)
    message = f"load failed for model '{name}': {error!r}"
    return ConchError(message, Code.UNAVAILABLE, public=without_directories(message))


async def _regularly(work: Callable[[], Awaitable[None]], seconds: float, what: str) -> None:
    """Run ``work`` now and every ``seconds``; logs a failure unless it is the same as the last one."""
    logged = ""
    while True:
        try:
            await work()
            logged = ""
        except Exception as error:
            reason = one_line(error)
            if reason != logged:
                LOG.warning("failed to %s: %s", what, reason, exc_info=not isinstance(error, ConchError | OSError))
            logged = reason
        await asyncio.sleep(seconds)


def _step_models(config: ModelConfig) -> frozenset[str]:
    """Return the names of the models in an ensemble's steps."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
