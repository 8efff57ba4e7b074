"""Loads a model version: completes its configuration, starts its workers and creates its executor.

Called by ``ModelLoader`` (``model_loader.py``), on the event loop. A load that fails ends all workers that it has
started. Responses of an ensemble depend on the models of its steps: when one is reloaded, the ensemble gets a new scope
in the response cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Final, Protocol

from conch.backends.table import BACKENDS, backend_of
from conch.config.complete import complete_ensemble
from conch.config.effects import ineffective_problems
from conch.config.reading import refuse
from conch.config.remote import is_remote
from conch.config.schema import ModelConfig, copied, implementation, is_ensemble, with_placement, without_placement
from conch.config.signature import histogram_buckets, parameters, signature
from conch.config.validate import (
    check_directory_name,
    response_cache_problems,
    validate,
    validate_ensemble,
    validate_load,
    validate_written,
)
from conch.core.errors import ConchError
from conch.options.settings import Settings, by_scope
from conch.repository.backends import BackendDirectories
from conch.repository.fingerprint import (
    NO_IDENTITY,
    Dependency,
    ExternalFiles,
    Identity,
    identity_of,
    joint_identity,
    take_external,
)
from conch.repository.model_files import ModelFiles
from conch.repository.names import qualified
from conch.server.caching.cache import CacheScope, NoEntries, ResponseCache
from conch.server.concurrency import gather_all
from conch.server.execution.caching import CacheLookup
from conch.server.execution.dispatch import Dispatcher, is_limited
from conch.server.execution.ensemble import Ensemble, Step
from conch.server.execution.executor import Executor
from conch.server.execution.remote.executor import RemoteSequences, complete_remote, make_executor
from conch.server.execution.scheduling import make_scheduler, preserves_ordering, read_states
from conch.server.execution.starting import (
    WorkerPlacement,
    WorkerServices,
    WorkerStarter,
    compare_placements,
    placements_of,
)
from conch.server.execution.worker import SupervisedWorker
from conch.server.model import Model, dependencies_of
from conch.server.models.states import ModelTable
from conch.server.schedulers.rate_limiter import InstanceRateLimiter
from conch.server.schedulers.sequences.inputs import StateTensor
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.process import WorkerProcess

LOG = logging.getLogger("conch")


class NewStatistics(Protocol):
    """Creates the statistics of a version; see :meth:`conch.telemetry.metrics.Registry.statistics`."""

    def __call__(
        self, name: str, version: int, *, decoupled: bool = False, buckets: Mapping[str, Sequence[float]] = {}
    ) -> ModelStatistics: ...


class VersionLoader:
    """Creates :class:`Model` objects.

    ``table`` has the models of ensemble steps; ``new_statistics`` creates the statistics of a version; ``cache`` stores
    responses of models that enable it.
    """

    def __init__(
        self,
        settings: Settings,
        gpus: tuple[int, ...],
        table: ModelTable,
        new_statistics: NewStatistics,
        services: WorkerServices | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self._settings = settings
        self._backends = BackendDirectories.beginning_with(settings.backend_directory)
        self._gpus = gpus
        self._table = table
        self._new_statistics = new_statistics
        self._services = services or WorkerServices()
        self._cache = cache
        self._remote_sequences = RemoteSequences()
        self._limiter = InstanceRateLimiter(settings.rate_limit_resource) if settings.rate_limit != "off" else None

    def configure(self, files: ModelFiles) -> ModelConfig:
        """Return the configuration of a model before its backend completes it.

        Raises INVALID_ARG if the model has no backend or a name that differs from its directory. If backends complete
        nothing, also raises INVALID_ARG for incomplete tensors and INTERNAL for a model without a configuration.
        """
        as_written = self._settings.disable_auto_complete_config
        if as_written:
            files.check_configured()
        config = files.completed(self._gpus)
        (validate_written if as_written else validate)(config)
        check_directory_name(config, files.name)
        for problem in ineffective_problems(config):
            LOG.warning("model '%s': %s", config.name, problem.message)
        if config.response_cache.enable and self._cache is None:
            LOG.warning("model '%s' enables the response cache; the server has none (--cache-config)", config.name)
        return config

    async def load(
        self,
        files: ModelFiles,
        version: int,
        config: ModelConfig,
        steps: Mapping[str, str],
        on_stalled: Callable[[], None],
    ) -> Model:
        """Load a version of a model. Raises the reason if it cannot run.

        ``steps`` maps the model names in an ensemble's steps to their keys. ``on_stalled`` is called while a loading
        worker is stalled.
        """
        LOG.info("loading: %s:%d", files.key, version)
        start = monotonic_ns()
        if is_ensemble(config):
            model = await self._load_ensemble(files, version, config, steps)
        elif is_remote(config):
            model = await self._load_remote(files, version, config)
        else:
            model = await self._load_workers(files, version, config, on_stalled)
        model.statistics.load_ns = monotonic_ns() - start
        model.directory, model.written_config = files.version_directory(version), files.config
        return model

    async def _load_workers(
        self, files: ModelFiles, version: int, config: ModelConfig, on_stalled: Callable[[], None]
    ) -> Model:
        """Load a version that runs in workers of this server."""
        load_time = time_ns()
        if config.runtime or config.backend not in BACKENDS:
            await asyncio.to_thread(self._backends.check, config, files.directory, version)
        starter = self._starter(files, version, config, on_stalled)
        try:
            if not self._settings.disable_auto_complete_config:
                await starter.complete()
                config = starter.config
            validate_load(config, self._gpus)
            statistics = self._statistics(files, version, config)
            states = await asyncio.to_thread(read_states, config, files.directory)
            dispatcher = self._dispatcher(config, version, statistics, states)
            labels = await asyncio.to_thread(files.labels)
            await self._add_workers(dispatcher, starter, self._placements(config))
        finally:
            starter.kill_unused()
        try:
            identity = await self._identity(files, version, config, load_time, dispatcher)
            external = await asyncio.to_thread(_external_files, files, dispatcher, load_time)
        except BaseException:
            await dispatcher.stop(0)
            raise
        model = self._model(files, version, config, dispatcher, statistics, labels, identity)
        model.external = external
        model.set_runtime_facts(dispatcher.runtime_facts)
        return model

    async def _load_remote(self, files: ModelFiles, version: int, config: ModelConfig) -> Model:
        """Load a version of a remote model; its servers are needed only to complete its configuration."""
        if not self._settings.disable_auto_complete_config:
            config = await complete_remote(config, files.directory)
        validate_load(config, self._gpus)
        statistics = self._statistics(files, version, config)
        labels = await asyncio.to_thread(files.labels)
        limit = self._settings.max_pending_requests
        remote = await make_executor(
            config, version, files.directory, statistics, limit, files.key, self._remote_sequences
        )
        identity = Identity(unknown="what other servers run")
        return self._model(files, version, config, remote, statistics, labels, identity)

    def can_rescale(self, model: Model, config: ModelConfig) -> bool:
        """Whether :meth:`rescale` can apply ``config``: rate limiting of the instances must not start or end."""
        limits = self._limiter is not None and is_limited(config)
        return isinstance(model.executor, Dispatcher) and (model.executor.resources is not None) == limits

    async def rescale(
        self, model: Model, files: ModelFiles, config: ModelConfig, on_stalled: Callable[[], None]
    ) -> None:
        """Give a running version the instances in ``config``; unchanged instances keep their workers."""
        changed = with_placement(model.config, config)
        validate_load(changed, self._gpus)
        dispatcher = model.executor
        assert isinstance(dispatcher, Dispatcher)
        kept, new = compare_placements(dispatcher.placements(), self._placements(changed))
        await self._add_workers(dispatcher, self._starter(files, model.version, changed, on_stalled), new)
        dispatcher.keep([*kept, *new])
        model.reconfigure(changed)
        await dispatcher.finish_retiring()
        model.set_runtime_facts(dispatcher.runtime_facts)

    async def _load_ensemble(
        self, files: ModelFiles, version: int, config: ModelConfig, keys: Mapping[str, str]
    ) -> Model:
        """Load an ensemble, which has no process; ``keys`` has the keys of its steps' models, by name."""
        validate_load(config, self._gpus)
        labels = await asyncio.to_thread(files.labels)
        identity = await self._identity(files, version, config, time_ns())
        step_models = self.check_ensemble(config, keys)  # no ``await`` follows, so that none of them is unloaded
        config = copied(config)
        complete_ensemble(config, [model.config for model in step_models.values()])
        refuse(response_cache_problems(config))  # decoupled steps make it decoupled
        steps = [
            Step(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ]
        limit = config.ensemble_scheduling.max_inflight_requests
        if limit:
            LOG.info("Ensemble model '%s' configured with max_inflight_requests: %d", config.name, limit)
        find = self._find_by(keys)
        executor = Ensemble(signature(config, version), steps, find, limit)
        statistics = self._new_statistics(files.name, version)
        labels = {**_inherited_labels(steps, step_models), **labels}

        def current_step_models() -> list[Model]:
            return [find(step.model, step.version) for step in steps]

        return self._model(
            files, version, config, executor, statistics, labels, identity, steps=keys, step_models=current_step_models
        )

    def _find_by(self, keys: Mapping[str, str]) -> Callable[[str, int], Model]:
        """Return the function that finds the models of an ensemble's steps by name."""
        if all(name == key for name, key in keys.items()):
            return self._table.find
        return lambda name, version: self._table.find(keys[name], version)

    def check_ensemble(self, config: ModelConfig, keys: Mapping[str, str]) -> Mapping[str, Model]:
        """Return the models of an ensemble's steps by name. Raises INVALID_ARG if they do not serve or do not fit."""
        step_models = self._table.step_models(config, keys)
        validate_ensemble(config, {name: model.config for name, model in step_models.items()})
        return step_models

    def _dispatcher(
        self, config: ModelConfig, version: int, statistics: ModelStatistics, states: tuple[StateTensor, ...]
    ) -> Dispatcher:
        limit = self._settings.max_pending_requests
        scheduler = make_scheduler(config, signature(config, version), limit, states)
        backend = backend_of(implementation(config), parameters(config))
        limiter = self._limiter if is_limited(config) else None
        return Dispatcher(scheduler, statistics, limiter=limiter, prepares=backend.prepares)

    async def _identity(
        self, files: ModelFiles, version: int, config: ModelConfig, load_time: int, workers: Dispatcher | None = None
    ) -> Identity:
        """Return everything that the responses of a version depend on; empty unless the cache outlives versions.

        A model that does not use the cache has an identity too, because it may be in a step of an ensemble that does.
        """
        if self._cache is None or not self._cache.lasting:
            return NO_IDENTITY
        settings = self._backend_settings(config)
        return await version_identity(files, version, without_placement(config), load_time, settings, workers)

    def _statistics(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelStatistics:
        decoupled = config.model_transaction_policy.decoupled
        return self._new_statistics(files.name, version, decoupled=decoupled, buckets=histogram_buckets(config))

    def _model(
        self,
        files: ModelFiles,
        version: int,
        config: ModelConfig,
        executor: Executor,
        statistics: ModelStatistics,
        labels: Mapping[str, Sequence[str]],
        identity: Identity,
        *,
        steps: Mapping[str, str] | None = None,
        step_models: Callable[[], Sequence[Model]] = tuple,
    ) -> Model:
        """Return the model of a version, with the response cache if its configuration enables it."""
        cache, lookup = self._cache, None
        if cache is not None and config.response_cache.enable:
            key = qualified(files.namespace, config.name)
            scope = EnsembleCacheScope(
                lambda: dependencies_of(step_models()), lambda models: entries_of(cache, key, version, identity, models)
            )
            lookup = CacheLookup(executor, scope, statistics)
        return Model(
            config, version, executor, statistics, labels,
            namespace=files.namespace, steps=steps, step_models=step_models, identity=identity,
            cache=lookup, ordered=preserves_ordering(config),
        )  # fmt: skip

    def _starter(
        self, files: ModelFiles, version: int, config: ModelConfig, on_stalled: Callable[[], None]
    ) -> WorkerStarter:
        services = self._services
        if self._debugs(config):
            services = replace(services, new_process=partial(services.new_process, debugged=True), templates=None)
        backend_settings, warmup_limit = self._backend_settings(config), self._settings.max_warmup_bytes
        return WorkerStarter(files, version, config, services, on_stalled, backend_settings, warmup_limit)

    def _backend_settings(self, config: ModelConfig) -> dict[str, str]:
        """Return the settings of ``--backend-config`` for the model's backend."""
        scopes = by_scope(self._settings.backend_config)
        settings: dict[str, str] = {}
        for scope in ("", implementation(config), config.backend):
            settings |= scopes.get(scope, {})
        return settings

    def _placements(self, config: ModelConfig) -> list[WorkerPlacement]:
        """Return the placements of workers; a debugged model has only one, because only one can use the terminal."""
        placements = list(placements_of(config))
        return placements[:1] if self._debugs(config) else placements

    def _debugs(self, config: ModelConfig) -> bool:
        return bool(self._settings.debug) and config.name == self._settings.debug

    async def _add_workers(
        self, dispatcher: Dispatcher, starter: WorkerStarter, placements: Sequence[WorkerPlacement]
    ) -> None:
        """Start a worker at each placement; if one fails, stop the others."""
        resources = dispatcher.resources
        if resources is not None:
            resources.reserve(starter.config, placements)
        try:
            processes = await _all_or_none(starter.launch(placement) for placement in placements)
        except BaseException:
            if resources is not None:
                resources.release_reserved(placements)
            raise
        for placement, process in zip(placements, processes, strict=True):
            worker = SupervisedWorker(placement, starter.launch, dispatcher)
            dispatcher.add(worker)
            worker.adopt(process)


def _external_files(files: ModelFiles, workers: Dispatcher, load_time: int) -> ExternalFiles:
    """Return the files outside of the model's directory that its workers have read; blocking.

    A file that changed during the load counts as changed: the workers may have read the old one.
    """
    paths = {Path(text) for process in workers.processes for kind, text in process.dependencies if kind == "path"}
    external = take_external(path for path in paths if not path.is_relative_to(files.directory))
    return {path: frozenset(stamp for stamp in stamps if stamp[1] <= load_time) for path, stamps in external.items()}


async def _all_or_none(starts: Iterator[Coroutine[Any, Any, WorkerProcess]]) -> list[WorkerProcess]:
    """Wait for all workers; if one fails to start, end the others and raise its error."""
    results = await gather_all(starts, lambda worker: worker.stop(0))
    failure = next((result for result in results if isinstance(result, BaseException)), None)
    workers = [result for result in results if not isinstance(result, BaseException)]
    if failure is not None:
        await asyncio.gather(*(worker.stop() for worker in workers))
        raise failure
    return workers


def _inherited_labels(steps: list[Step], step_models: Mapping[str, Model]) -> dict[str, Any]:
    return {
        tensor: labels
        for step in steps
        for output, tensor in step.outputs.items()
        if (labels := step_models[step.model].labels(output)) is not None
    }


#: Names of the runtime facts that responses depend on.
_DECISIVE: Final = frozenset({"engine", "precision", "variant", "by_shape", "providers"})


class EnsembleCacheScope:
    """Returns the current cache scope of a version; ``make`` creates it for the models that ``sources`` returns.

    When a model of a step is replaced, the scope ends: responses that used the old model are not cached, however late
    they are.
    """

    def __init__(self, sources: Callable[[], Sequence[Model]], make: Callable[[Sequence[Model]], CacheScope]) -> None:
        self._sources = sources
        self._make = make
        models = sources()
        self._scope = make(models)
        self._serials = _serials(models)

    def __call__(self) -> CacheScope:
        try:
            models = self._sources()
        except ConchError:  # a step's model is not loaded; the executor reports it
            return self._scope
        serials = _serials(models)
        if serials != self._serials:
            self._scope.forget()
            self._scope, self._serials = self._make(models), serials
        return self._scope


def _serials(models: Sequence[Model]) -> list[int]:
    return [model.serial for model in models]


def entries_of(
    cache: ResponseCache, key: str, version: int, identity: Identity, sources: Sequence[Model]
) -> CacheScope:
    """Return the cache scope of the version with this ``key``, whose responses also depend on ``sources``.

    If clients may load LoRA adapters into a source, or the cache outlives the version and the identity is incomplete,
    logs a warning and returns an empty scope.
    """
    joint = joint_identity(identity, ((model.name, model.identity) for model in sources))
    unknown = joint.unknown if cache.lasting else ""
    for model in sources:
        if model.loads_adapters:
            unknown = f"LoRA adapters that clients load into '{model.name}'"
    if not unknown:
        return cache.scope(key, version, joint.digest)
    LOG.warning(
        "responses of '%s' version %d are not stored in the response cache, because they depend on something that is "
        "not in its keys: %s",
        key, version, unknown,
    )  # fmt: skip
    return NoEntries()


async def version_identity(
    files: ModelFiles,
    version: int,
    config: ModelConfig,
    load_time: int,
    settings: Mapping[str, str],
    workers: Dispatcher | None,
) -> Identity:
    """Compute the identity of a version from ``config`` without its placement and the ``settings`` of its backend.

    ``load_time`` is the start of its load (ns since the epoch), ``workers`` run the loaded version.
    """
    facts, dependencies = dict(settings), list[Dependency]()
    if workers is not None:
        facts |= {name: fact for name, fact in workers.runtime_facts.items() if name in _DECISIVE}
        dependencies = [Dependency(*pair) for process in workers.processes for pair in process.dependencies]
    directories = [files.directory, *([files.backend_directory] if files.backend_directory else [])]
    return await asyncio.to_thread(
        identity_of, directories, version, config, began=load_time, facts=facts, dependencies=dependencies
    )
