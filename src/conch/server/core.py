"""The server behind the front ends: finds models, reports their state, loads and unloads them.

Independent of protocols and ports. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final

from conch import __version__
from conch.config.reading import shown_name
from conch.core.errors import ConchError, invalid, not_found, unavailable, unsupported
from conch.core.inference import ModelSignature
from conch.core.sampling.parameters import check_adapter_name
from conch.machine import logs
from conch.machine.facts import visible_gpus
from conch.machine.logs import LogSettings
from conch.options.settings import SERVER_VERSION, Settings
from conch.repository.errors import without_directories
from conch.repository.names import check_model_name
from conch.repository.override import check_allowed, read_parameters
from conch.repository.scan import ModelRepository
from conch.server.bls import BlsModels
from conch.server.caching.chosen import make_cache
from conch.server.concurrency import end_all
from conch.server.execution.remote.executor import RemoteExecutor
from conch.server.execution.starting import WorkerServices, log_levels, worker_timeouts
from conch.server.model import Model
from conch.server.models.lifecycle import Lifecycle
from conch.server.models.memory import MemoryLedger
from conch.server.models.model_loader import ModelLoader
from conch.server.models.on_demand import LoadFootprints, LoadNeeded, OnDemand, on_demand_limits
from conch.server.models.polling import RepositoryPolling
from conch.server.models.states import ModelTable
from conch.server.models.version_loader import VersionLoader
from conch.server.models.versions import ServingVersions
from conch.server.overview import Overview
from conch.server.regions import ClientRegions
from conch.server.response_store import make_store
from conch.telemetry import families
from conch.telemetry.exposition import Family
from conch.telemetry.metrics import Registry
from conch.telemetry.statistics import ModelStatistics
from conch.telemetry.tracing.tracing import Tracing
from conch.workers.host.environment import Environments
from conch.workers.host.processes import WorkerProcesses
from conch.workers.host.templates import Templates

LOG = logging.getLogger("conch")


#: In Triton's order. The last entry reports conch's version to gRPC clients, because the message has no field for it.
EXTENSIONS: Final = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging", f"conch({__version__})",
)  # fmt: skip


class InferenceServer:
    """A server: its settings, models and metrics."""

    def __init__(self, settings: Settings, repository: ModelRepository, registry: Registry, tracing: Tracing) -> None:
        self.settings = settings
        self.tracing = tracing
        self.repository = repository
        self.live = True
        self.exiting = False
        self._initialised = False
        self._table = ModelTable(repository.naming)
        self._table.starting = None
        self._environments = Environments()
        self._processes = WorkerProcesses(timeouts=worker_timeouts(settings), metrics=registry.custom)
        self._templates = Templates(settings.worker_template_secs)
        self.regions = ClientRegions(settings.allow_client_shm, lambda: self._processes.pids, visible_gpus())
        self._cache = make_cache(settings.cache_config)
        self.response_store = make_store(self._cache, settings.response_store_bytes, settings.response_store_secs)
        version_loader = VersionLoader(
            settings,
            visible_gpus(),
            self._table,
            registry.statistics,
            WorkerServices(self._processes.new, self._templates, BlsModels(self), self._environments),
            self._cache,
        )
        self.ledger = MemoryLedger(
            self._table, checks=settings.check_memory_on_load, templates=lambda: self._templates.pids
        )
        registry.before_rendering = self.ledger.refresh
        registry.add(self._worker_families)
        if self._cache is not None:
            registry.add(self._cache.families)
        self._versions = ServingVersions(self._table, registry, self.ledger, settings.unload_timeout_secs)
        models = ModelLoader(
            repository,
            version_loader,
            self._table,
            self._versions,
            self.ledger,
            asyncio.Semaphore(settings.model_load_thread_count),
            settings.model_load_retry_count,
        )
        self._lifecycle = Lifecycle(models)
        self.overview = Overview(self._table)
        self._polling: RepositoryPolling | None = None
        if settings.model_control_mode == "poll":
            self._polling = RepositoryPolling(repository, self._lifecycle, settings.repository_poll_secs)
        self._on_demand: OnDemand | None = None
        if settings.model_control_mode == "on-demand":
            self._on_demand = OnDemand(
                on_demand_limits(settings),
                settings.load_model,
                repository,
                self._table,
                self._lifecycle,
                LoadFootprints(repository, self.ledger, visible_gpus()),
            )
            registry.add(self._on_demand.families)

    @property
    def logs(self) -> LogSettings:
        return logs.current()

    @property
    def ready(self) -> bool:
        """Whether startup is complete, the server is not stopping and, with strict readiness, the models are ready."""
        if not self._initialised or self.exiting:
            return False
        if not self.settings.strict_readiness:
            return True
        if self._on_demand is not None:  # other models are evicted when idle
            return self._table.ready_names(self.settings.load_model)
        return self._table.all_ready()

    def in_flight(self, names: Collection[str] = ()) -> int:
        """Return the number of in-flight requests of the models ``names``, or of all models.

        A request of an ensemble counts in addition to the requests of its steps.
        """
        return sum(model.in_flight for model in self._table.loaded() if not names or model.name in names)

    @property
    def loads_on_demand(self) -> bool:
        """Whether :meth:`model` may raise :class:`LoadNeeded`."""
        return self._on_demand is not None

    def metadata(self) -> dict[str, Any]:
        """Return the body of ``GET /v2``; ``version`` is the compatible version of Triton."""
        return {
            "name": self.settings.id,
            "version": SERVER_VERSION,
            "extensions": list(EXTENSIONS),
            "conch_version": __version__,
        }

    def model(self, name: str, version: int = -1) -> Model:
        """Return a model that serves. Raises NOT_FOUND or UNAVAILABLE if it does not.

        In on-demand mode, the error may be :class:`LoadNeeded`, with which the caller can wait for the model.
        """
        try:
            return self._table.named(name, version)
        except ConchError as missing:
            if self._on_demand is None:
                raise
            raise self._on_demand.needed(name, missing) from None

    def versions_of(self, name: str) -> list[Model]:
        """Return the versions of a model that serve; empty if none does."""
        return [model for model in self._table.loaded() if model.name == name]

    def update_endpoints(self, name: str, urls: Sequence[str]) -> None:
        """Send the requests of a remote model to these servers from now on."""
        for model in self.versions_of(name):
            if isinstance(model.executor, RemoteExecutor):
                model.executor.endpoints.update(urls)

    async def loaded_model(self, name: str, version: int = -1) -> Model:
        """Return a model that serves; waits for its load in on-demand mode."""
        while True:
            try:
                return self.model(name, version)
            except LoadNeeded as needed:
                await needed.wait()

    def model_metadata(self, name: str, version: int = -1) -> dict[str, Any]:
        """Return the body of ``GET /v2/models/<name>``, with all ready versions unless ``version`` is given."""
        model = self.model(name, version)
        metadata = model.metadata
        if version == -1:
            metadata["versions"] = [str(ready) for ready in self._table.models[model.key].ready_versions()]
        return metadata

    def model_ready(self, name: str, version: int = -1) -> bool:
        """Whether requests to a model can run now, or after a load on demand; False for an unknown model."""
        try:
            return self._table.is_ready(self._table.named(name, version))
        except ConchError as missing:
            return self._can_be_loaded(name, missing)

    def _can_be_loaded(self, name: str, missing: ConchError) -> bool:
        demand = self._on_demand
        return demand is not None and demand.can_serve(name) and isinstance(demand.needed(name, missing), LoadNeeded)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Return the repository index: an entry per version, in order; only the name if a model was never loaded."""
        directories = [] if ready_only else await self.repository.listed()
        if self._on_demand is not None and not ready_only:
            self._on_demand.known = frozenset(directories)
        return self._table.index(directories, ready_only)

    async def public_index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """Return the index for clients in other processes; its reasons omit directories of this machine."""
        entries = await self.index(ready_only)
        for entry in entries:
            if "reason" in entry:
                entry["reason"] = without_directories(entry["reason"])
        return entries

    def ready_models(self) -> list[str]:
        """Return the names of the models that serve or can be loaded on demand."""
        serving = self._table.serving_names()
        if self._on_demand is not None:
            serving |= set(filter(self._on_demand.can_serve, self._on_demand.known))
        return sorted(serving)

    def signature(self, name: str) -> ModelSignature | None:
        """Return the signature of a model; None if it can be loaded on demand but never was.

        Raises NOT_FOUND or UNAVAILABLE for a model that neither serves nor can be loaded on demand.
        """
        try:
            return self.model(name).signature
        except LoadNeeded:
            assert self._on_demand is not None
            return self._on_demand.signatures.get(name)

    def signatures(self) -> dict[str, ModelSignature | None]:
        """Return the signature of each model that serves or can be loaded on demand; None as in :meth:`signature`.

        Names that several models have, in different repositories, are left out: no request can choose one of them.
        """
        signatures: dict[str, ModelSignature | None] = {}
        for name in self.ready_models():
            with suppress(ConchError):
                signatures[name] = self.signature(name)
        return signatures

    def adapters(self) -> dict[str, str]:
        """Return the ids of the LoRA adapters of the ready models, each with the name of its model.

        The id is the adapter's name, or ``MODEL:ADAPTER`` if a model or an adapter of another model has the same name.
        The adapters of a model that is loaded on demand are known after its first load.
        """
        owners = self._adapter_owners()
        models = set(self.ready_models()) if owners else set()
        return {
            adapter if len(names) == 1 and adapter not in models else f"{name}:{adapter}": name
            for adapter, names in owners.items()
            for name in names
            if name in models
        }

    def adapter_model(self, id: str) -> str | None:
        """Return the model of the LoRA adapter ``ADAPTER`` or ``MODEL:ADAPTER``, None if there is none.

        The name of a model is never that of an adapter. Raises INVALID_ARG for an adapter's name of several models.
        """
        owners = self._adapter_owners()
        if not owners or id in self.ready_models():
            return None
        names = owners.get(id, [])
        if len(names) > 1:
            ids = " or ".join(f"'{name}:{id}'" for name in names)
            raise invalid(f"several models have a LoRA adapter '{id}': use {ids}", "model")
        names = names or [name for adapter in owners for name in owners[adapter] if f"{name}:{adapter}" == id]
        return names[0] if names else None

    def _adapter_owners(self) -> dict[str, list[str]]:
        """Return the names of the models that have a LoRA adapter, by the adapter's name."""
        signatures = {} if self._on_demand is None else dict(self._on_demand.signatures)
        signatures |= {model.name: model.signature for model in self._table.loaded()}
        owners: dict[str, list[str]] = {}
        for name, signature in sorted(signatures.items()):
            for adapter in signature.adapters:
                owners.setdefault(adapter, []).append(name)
        return owners

    async def load_adapter(self, name: str, path: str, model: str = "", *, in_place: bool = False) -> None:
        """Load a LoRA adapter into a model; without ``model``, into the only loaded one that allows it.

        Raises UNSUPPORTED for a model whose parameters do not allow it, and the errors of its worker.
        """
        check_adapter_name(name)
        if name in self.ready_models():
            raise invalid(f"'{name}' is the name of a model: choose another one for the LoRA adapter", "lora_name")
        if model:
            chosen = await self.loaded_model(model)
        else:
            chosen = self._only([loaded for loaded in self._newest() if loaded.loads_adapters], "load LoRA adapters")
        with chosen.held():
            await chosen.load_adapter(name, path, in_place)
        LOG.info("loaded LoRA adapter '%s' of model '%s' from %s", name, chosen.name, path)

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Unload a LoRA adapter that was loaded at run time. Raises NOT_FOUND for an unknown one."""
        check_adapter_name(name)
        if model:
            chosen = self.model(model)
        else:
            owners = [loaded for loaded in self._newest() if name in loaded.signature.adapters]
            if not owners:
                raise not_found(f"The lora adapter '{name}' cannot be found.")
            chosen = self._only(owners, f"have a LoRA adapter '{name}'")
        await chosen.unload_adapter(name)
        LOG.info("unloaded LoRA adapter '%s' of model '%s'", name, chosen.name)

    def _newest(self) -> list[Model]:
        """Return the newest version of each model that serves."""
        return list({model.key: model for model in sorted(self._table.loaded(), key=attrgetter("version"))}.values())

    def _only(self, models: list[Model], what: str) -> Model:
        if not models:
            raise unsupported(
                f"no loaded model is configured to {what}: its parameter 'lora_folders' must name folders"
            )
        if len(models) > 1:
            names = ", ".join(sorted(model.name for model in models))
            raise invalid(f"several models {what}: name one of {names}", "base_model_name")
        return models[0]

    def statistics(self, name: str = "", version: int = -1) -> list[dict[str, Any]]:
        """Return the statistics of one version, of all ready versions of a model, or of all models."""
        return [statistics.snapshot() for statistics in self.counters(name, version)]

    def counters(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """Return the counters behind :meth:`statistics`, so that the caller can take many snapshots in steps."""
        self.ledger.refresh()
        if not name:
            return [model.statistics for model in sorted(self._table.loaded(), key=attrgetter("name", "version"))]
        serving = [models for key in self._table.keys(name) if (models := self._table.models[key].models())]
        models = serving[0] if len(serving) == 1 else []
        if not models:
            raise invalid(f"requested model '{name}' is not available")
        chosen = [model for model in models if version in (-1, model.version)]
        if not chosen:
            raise invalid(f"requested model version is not available for model '{name}'")
        return [model.statistics for model in chosen]

    def require_explicit_control(self) -> None:
        """Raise UNAVAILABLE unless models are loaded and unloaded on request; the message begins as in Triton."""
        if (mode := self.settings.model_control_mode) in ("none", "poll"):
            more = "" if mode == "poll" else "; this server runs with --model-control-mode=none: start it with explicit"
            raise unavailable(f"explicit model load / unload is not allowed if polling is enabled{more}")

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model, from the repository or with a configuration (JSON) and files from the client.

        Raises INVALID_ARG for a load that sends more than ``--model-load-overrides`` allows.
        """
        self.require_explicit_control()
        check_allowed(self.settings.model_load_overrides, config, files or {})
        parameters: dict[str, object] = {f"file:{path}": content for path, content in (files or {}).items()}
        if config is not None:
            parameters["config"] = config
        check_model_name(name)
        if self._on_demand is not None:
            await self._on_demand.load(name, parameters)
            return
        override = read_parameters(name, parameters)
        override = replace(override, of_any_code=self.settings.model_load_overrides == "files")
        await self._lifecycle.load_named(name, override)

    async def load_with(self, name: str, parameters: Mapping[str, object]) -> None:
        """Load or reload a model for another model; parameters are ``config`` (str) and ``file:<path>`` (bytes)."""
        self.require_explicit_control()
        check_model_name(name)
        if self._on_demand is not None:
            await self._on_demand.load(name, parameters, by_model=True)
            return
        await self._lifecycle.load_named(name, read_parameters(name, parameters), by_model=True)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model, even if the caller is cancelled; does nothing if it is not loaded."""
        self.require_explicit_control()
        check_model_name(name)
        if self._on_demand is None:
            await self._lifecycle.complete(self._lifecycle.unload_named(name, dependents))
        else:
            await self._lifecycle.complete(self._on_demand.unload(name, dependents))

    def _worker_families(self) -> Iterator[Family]:
        """Yield the metrics of model readiness, template memory and killed workers."""
        yield families.readiness(
            (model.name, model.namespace, model.version, model.ready) for model in self._table.loaded()
        )
        yield families.template_memory(self.ledger.template_bytes)
        yield families.kills((model, cause.value, count) for (model, cause), count in self._processes.kills.items())

    def check_traced(self, name: str) -> None:
        """Raise INVALID_ARG if trace settings name an unknown model; an empty name means all models."""
        if name and name not in self.ready_models():
            raise invalid(f"Request for unknown model : {name}")

    def update_logs(self, changes: Mapping[str, Any]) -> None:
        """Change the log settings of the server and its workers."""
        logs.current().update(**changes)
        levels = log_levels()
        for model in self._table.loaded():
            for process in model.executor.processes:
                process.set_log(levels)

    # Called by the application.

    async def load_startup_models(self) -> dict[str, ConchError]:
        """Load the models that the control mode loads at startup; return the errors of failed loads by name."""
        keys: list[str] = []
        named = self.settings.model_control_mode in ("explicit", "on-demand")
        if not named or self.settings.load_model == ("*",):
            keys = await self.repository.listed()
        else:
            keys = await self.repository.in_thread(partial(self.repository.keys_of, self.settings.load_model))
        for path in await self.repository.in_thread(self.repository.unnameable):
            LOG.warning("%s is skipped: the name of a model must be UTF-8", shown_name(str(path)))
        self._table.starting = frozenset(keys)
        if not keys:
            self._warn_about_empty_repository()
        if self._polling is not None:
            await self._polling.record_state()
        if self._on_demand is not None:
            self._on_demand.start(self.settings.repository_poll_secs)
            await self._on_demand.refresh()
        failed = await self._lifecycle.load_all(keys)
        self._table.starting = frozenset()
        self._initialised = True
        if self._polling is not None:
            self._polling.note(keys, failed)
            self._polling.start()
        return failed

    async def load_changed(self, names: Sequence[str]) -> dict[str, ConchError]:
        """Load new and changed models of the repository; return the errors of failed loads by name."""
        return await self._lifecycle.load_all(list(names))

    async def unload_removed(self, name: str) -> None:
        """Unload a model whose files were removed or changed; in on-demand mode, a request can load it again."""
        if self._on_demand is None:
            await self._lifecycle.unload(name)
        else:
            await self._on_demand.unload(name, dependents=False)

    def _warn_about_empty_repository(self) -> None:
        if self.settings.model_control_mode == "explicit" and not self.settings.load_model:
            LOG.info("no model is loaded at the start: clients load models, or --load-model names them")
            return
        if self.settings.model_control_mode == "on-demand":
            LOG.info("no model is loaded at startup: a request loads its model")
            return
        LOG.warning(
            "the model repository is empty: %s has no folder of a model (NAME/1/model.py, NAME/1/model.json …)",
            ", ".join(self.settings.model_repository),
        )

    def model_rows(self) -> list[tuple[str, str, str]]:
        """Return name, version and status of every model version, for the table in the startup log."""
        return self._table.rows()

    async def stop(self, seconds: float) -> bool:
        """Refuse new requests, wait up to ``seconds`` for in-flight ones, end all models; False after a timeout."""
        self.exiting = True
        if self._polling is not None:
            self._polling.stop()
        if self._on_demand is not None:
            await self._on_demand.close()
        await self._lifecycle.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        models = self._table.loaded()
        for model in models:
            model.stopping = True
        used = bool(models) or self._table.starting is not None  # False if a port was already in use
        if used:
            LOG.info("Waiting for in-flight requests to complete.")
        in_time = True
        # A model ends after its callers (ensembles and models with BLS), even if these have been replaced.
        while busy := [
            *(model for model in models if model.in_use),
            *(model for model in self._versions.ending if model.in_flight),
        ]:
            left = deadline - loop.time()
            LOG.info("Timeout %d: Found %d model versions that have in-flight inferences", max(left, 0), len(busy))
            for model in busy:
                LOG.info(
                    "Model '%s' (version %d) has %d in-flight inferences",
                    model.name,
                    model.version,
                    model.in_flight or model.executor.sequences,
                )
            if left <= 0:
                in_time = False
                break
            await asyncio.wait([loop.create_task(model.drain(min(left, 1.0))) for model in busy])
        if used:
            LOG.info("All models are stopped, unloading models")
        timeout: float | None = None
        if not in_time:
            # Idle workers can still finalize their models.
            for model in models:
                model.abandon()
            timeout = min(self.settings.finalize_timeout_secs, self.settings.exit_timeout_secs)
        await end_all("end a model", *(model.stop(timeout) for model in models))
        ended = await self._versions.finish(max(deadline - loop.time(), 0.0))
        await self._processes.close()
        await self._templates.close()
        await self._versions.remove_uploads()
        if self._cache is not None:
            await self._cache.close()
        await self._environments.close()
        return ended and in_time
