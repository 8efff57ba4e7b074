"""Loads a model version: completes its configuration, starts its workers and creates its executor.

Called by the lifecycle, on the event loop. A load that fails ends all workers that it has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Protocol

from conch.backends.table import BACKENDS, backend_of
from conch.config.complete import complete_ensemble, merge_completion
from conch.config.effects import ineffective_problems
from conch.config.reading import refuse
from conch.config.remote import is_remote
from conch.config.schema import ModelConfig, copied, implementation, is_ensemble, with_placement, without_placement
from conch.config.signature import first_response_buckets, parameters, signature
from conch.config.validate import (
    check_directory_name,
    response_cache_problems,
    validate,
    validate_ensemble,
    validate_load,
    validate_written,
)
from conch.repository.backends import BackendDirectories
from conch.repository.fingerprint import NO_IDENTITY, ExternalFiles, Identity, take_external
from conch.repository.model_files import ModelFiles
from conch.repository.names import qualified
from conch.server.caching.cache import ResponseCache
from conch.server.concurrency import gather_all
from conch.server.execution.caching import CacheLookup
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.ensemble import Ensemble, Step
from conch.server.execution.executor import Executor
from conch.server.execution.remote.executor import RemoteSequences
from conch.server.execution.remote.loading import complete_remote, make_executor
from conch.server.execution.resources import is_limited
from conch.server.execution.scheduling import make_scheduler, preserves_ordering, read_states
from conch.server.execution.starting import WorkerPlacement, WorkerStarter, compare_placements, placements_of
from conch.server.execution.worker import SupervisedWorker
from conch.server.model import Model, dependencies_of
from conch.server.models.cache_scopes import EnsembleCacheScope, entries_of, version_identity
from conch.server.models.states import ModelTable
from conch.server.schedulers.rate_limiter import InstanceRateLimiter
from conch.server.schedulers.sequences.inputs import StateTensor
from conch.settings import Settings, by_scope
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.bls import BlsServer
from conch.workers.host.environment import Environments
from conch.workers.host.process import WorkerProcess
from conch.workers.host.templates import Templates

LOG = logging.getLogger("conch")


class NewStatistics(Protocol):
    """Creates the statistics of a version; see :meth:`conch.telemetry.metrics.Registry.statistics`."""

    def __call__(
        self, name: str, version: int, *, decoupled: bool = False, buckets: Iterable[float] = ()
    ) -> ModelStatistics: ...


class Loader:
    """Creates :class:`Model` objects.

    ``table`` has the models of ensemble steps; ``new_statistics`` creates the statistics of a version;
    ``models`` serves the BLS calls of workers; ``new_process`` creates a worker process, not started yet, from its name
    and an optional function that spawns it; ``templates`` fork workers, if given; ``cache`` stores responses of models
    that enable it.
    """

    def __init__(
        self,
        settings: Settings,
        gpus: tuple[int, ...],
        table: ModelTable,
        new_statistics: NewStatistics,
        models: BlsServer | None = None,
        environments: Environments | None = None,
        new_process: Callable[..., WorkerProcess] = WorkerProcess,
        templates: Templates | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self._settings = settings
        self._backends = BackendDirectories.beginning_with(settings.backend_directory)
        self._gpus = gpus
        self._table = table
        self._new_statistics = new_statistics
        self._models = models
        self._environments = environments or Environments()
        self._new_process = new_process
        self._templates = templates
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
        if is_ensemble(config):
            return await self._load_ensemble(files, version, config, steps)
        if is_remote(config):
            return await self._load_remote(files, version, config)
        LOG.info("loading: %s:%d", files.key, version)
        begun, load_time = monotonic_ns(), time_ns()
        if config.runtime or config.backend not in BACKENDS:
            await asyncio.to_thread(self._backends.check, config, files.directory, version)
        starter = self._starter(files, version, config, on_stalled)
        first: WorkerProcess | None = None
        if self._settings.disable_auto_complete_config:
            validate_load(config, self._gpus)
        else:
            first, completed = await starter.complete()
        try:
            if first is not None:
                starter.config = copied(config)
                merge_completion(starter.config, completed)
                validate_load(starter.config, self._gpus)
            statistics = self._new_statistics(
                files.name,
                version,
                decoupled=starter.config.model_transaction_policy.decoupled,
                buckets=first_response_buckets(starter.config),
            )
            states = await asyncio.to_thread(read_states, starter.config, files.directory)
            dispatcher = self._dispatcher(starter.config, version, statistics, states)
            labels = await asyncio.to_thread(files.labels)
            await self._add_workers(dispatcher, starter, self._placements(starter.config), first)
        except BaseException:
            if first is not None:
                first.kill()
            raise
        try:
            identity = await self._identity(files, version, starter.config, load_time, dispatcher)
            external = await asyncio.to_thread(_external_files, files, dispatcher, load_time)
        except BaseException:
            await dispatcher.stop(0)
            raise
        cache = self._cache_lookup(dispatcher, identity, version, starter.config, statistics, files.namespace)
        model = Model(
            starter.config, version, dispatcher, statistics, labels, namespace=files.namespace, identity=identity,
            cache=cache, ordered=preserves_ordering(starter.config),
        )  # fmt: skip
        model.external = external
        model.set_runtime_facts(dispatcher.runtime_facts)
        statistics.load_ns = monotonic_ns() - begun
        return model

    async def _load_remote(self, files: ModelFiles, version: int, config: ModelConfig) -> Model:
        """Load a version of a remote model; its servers are needed only to complete its configuration."""
        LOG.info("loading: %s:%d", files.key, version)
        begun = monotonic_ns()
        if not self._settings.disable_auto_complete_config:
            config = await complete_remote(config, files.directory)
        validate_load(config, self._gpus)
        decoupled = config.model_transaction_policy.decoupled
        statistics = self._new_statistics(
            files.name, version, decoupled=decoupled, buckets=first_response_buckets(config)
        )
        identity = Identity(unknown="what other servers run")
        labels = await asyncio.to_thread(files.labels)
        limit = self._settings.max_pending_requests
        remote = await make_executor(
            config, version, files.directory, statistics, limit, files.key, self._remote_sequences
        )
        cache = self._cache_lookup(remote, identity, version, config, statistics, files.namespace)
        model = Model(
            config, version, remote, statistics, labels, namespace=files.namespace, identity=identity,
            cache=cache, ordered=preserves_ordering(config),
        )  # fmt: skip
        statistics.load_ns = monotonic_ns() - begun
        return model

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
        """Load an ensemble, which has no process of its own; ``keys`` has the keys of its steps' models, by name."""
        LOG.info("loading: %s:%d", files.key, version)
        begun, load_time = monotonic_ns(), time_ns()
        validate_load(config, self._gpus)
        labels = await asyncio.to_thread(files.labels)
        identity = await self._identity(files, version, config, load_time)
        members = self.check_ensemble(config, keys)  # no ``await`` follows, so that none of them is unloaded
        config = copied(config)
        complete_ensemble(config, [member.config for member in members.values()])
        refuse(response_cache_problems(config))  # decoupled steps make it decoupled
        steps = [
            Step(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ]
        statistics = self._new_statistics(files.name, version)
        limit = config.ensemble_scheduling.max_inflight_requests
        if limit:
            LOG.info("Ensemble model '%s' configured with max_inflight_requests: %d", config.name, limit)
        find = self._find_by(keys)
        executor = Ensemble(signature(config, version), steps, find, limit)
        statistics.load_ns = monotonic_ns() - begun

        def current_step_models() -> list[Model]:
            return [find(step.model, step.version) for step in steps]

        cache = self._cache_lookup(
            executor,
            identity,
            version,
            config,
            statistics,
            files.namespace,
            lambda: dependencies_of(current_step_models()),
        )
        labels = {**_inherited_labels(steps, members), **labels}
        model = Model(
            config, version, executor, statistics, labels,
            namespace=files.namespace, steps=keys, step_models=current_step_models, identity=identity, cache=cache,
        )  # fmt: skip
        return model

    def _find_by(self, keys: Mapping[str, str]) -> Callable[[str, int], Model]:
        """Return the function that finds the models of an ensemble's steps by name."""
        if all(name == key for name, key in keys.items()):
            return self._table.find
        return lambda name, version: self._table.find(keys[name], version)

    def check_ensemble(self, config: ModelConfig, keys: Mapping[str, str]) -> Mapping[str, Model]:
        """Return the models of an ensemble's steps by name. Raises INVALID_ARG if they do not serve or do not fit."""
        members = self._table.step_models(config, keys)
        validate_ensemble(config, {name: member.config for name, member in members.items()})
        return members

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

    def _cache_lookup(
        self,
        executor: Executor,
        identity: Identity,
        version: int,
        config: ModelConfig,
        statistics: ModelStatistics,
        namespace: str,
        sources: Callable[[], Sequence[Model]] = tuple,
    ) -> CacheLookup | None:
        """Return what looks up requests before ``executor`` gets them, if the configuration enables the cache."""
        cache, key = self._cache, qualified(namespace, config.name)
        if cache is None or not config.response_cache.enable:
            return None
        scope = EnsembleCacheScope(sources, lambda models: entries_of(cache, key, version, identity, models))
        return CacheLookup(executor, scope, statistics)

    def _starter(
        self, files: ModelFiles, version: int, config: ModelConfig, on_stalled: Callable[[], None]
    ) -> WorkerStarter:
        new_process, templates = self._new_process, self._templates
        if self._debugs(config):
            new_process, templates = partial(self._new_process, debugged=True), None
        return WorkerStarter(
            files,
            version,
            config,
            self._backend_settings(config),
            self._models,
            self._environments,
            new_process,
            on_stalled,
            templates=templates,
            warmup_limit=self._settings.max_warmup_bytes,
        )

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
        self,
        dispatcher: Dispatcher,
        starter: WorkerStarter,
        placements: Sequence[WorkerPlacement],
        first: WorkerProcess | None = None,
    ) -> None:
        """Start a worker at each placement, all or none; ``first`` is already started and takes the first placement."""
        resources = dispatcher.resources
        if resources is not None:
            resources.reserve(starter.config, placements)
        try:
            processes = await _all_or_none(
                starter.launch(placement, None if index else first) for index, placement in enumerate(placements)
            )
        except BaseException:
            if resources is not None:
                resources.give_up(placements)
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


def _inherited_labels(steps: list[Step], members: Mapping[str, Model]) -> dict[str, Any]:
    return {
        tensor: labels
        for step in steps
        for output, tensor in step.outputs.items()
        if (labels := members[step.model].labels(output)) is not None
    }
