"""The server as its front ends see it: finds models, tells their state, loads and unloads them.

Knows no protocol and opens no port.  Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from conch import __version__, logs
from conch.caching.chosen import make_cache
from conch.config.reading import shown_name
from conch.errors import ConchError, invalid, unavailable
from conch.inference import ModelSignature
from conch.logs import LogSettings
from conch.repository.errors import without_directories
from conch.repository.names import check_model_name
from conch.repository.override import read_parameters
from conch.repository.scan import ModelRepository
from conch.server.bls import BlsModels
from conch.server.concurrency import end_all
from conch.server.execution.devices import visible_gpus
from conch.server.execution.starting import log_levels
from conch.server.execution.worker_timeouts import worker_timeouts
from conch.server.extensions import EXTENSIONS
from conch.server.model import Model
from conch.server.models.footprints import LoadFootprints
from conch.server.models.lifecycle import Lifecycle
from conch.server.models.loading import Loader
from conch.server.models.memory import MemoryLedger
from conch.server.models.on_demand import LoadNeeded, OnDemand, on_demand_limits
from conch.server.models.overrides import check_allowed
from conch.server.models.polling import RepositoryPolling
from conch.server.models.rollout import Rollout
from conch.server.models.states import ModelTable
from conch.server.regions.registry import ClientRegions
from conch.settings import SERVER_VERSION, Settings
from conch.telemetry import families
from conch.telemetry.exposition import Family
from conch.telemetry.metrics import Registry
from conch.telemetry.statistics import ModelStatistics
from conch.telemetry.tracing.tracing import Tracing
from conch.workers.host.environment import Environments
from conch.workers.host.processes import WorkerProcesses
from conch.workers.host.templates import Templates

LOG = logging.getLogger("conch")


class InferenceServer:
    """One server: its settings, its models, its metrics."""

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
        loader = Loader(
            settings,
            visible_gpus(),
            self._table.find,
            registry.statistics,
            BlsModels(self),
            self._environments,
            self._processes.new,
            self._templates,
            self._cache,
        )
        self.ledger = MemoryLedger(
            self._table, checks=settings.check_memory_on_load, templates=lambda: self._templates.pids
        )
        registry.before_rendering = self.ledger.refresh
        self._rollout = Rollout(
            repository,
            loader,
            self._table,
            registry,
            parallel_loads=settings.model_load_thread_count,
            retries=settings.model_load_retry_count,
            ledger=self.ledger,
            unload_seconds=settings.unload_timeout_secs,
        )
        registry.add(self._worker_families)
        if self._cache is not None:
            registry.add(self._cache.families)
        self._lifecycle = Lifecycle(repository, loader, self._table, self._rollout)
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
        """Whether the models that should be there can be used."""
        if not self._initialised or self.exiting:
            return False
        if not self.settings.strict_readiness:
            return True
        if self._on_demand is not None:  # others come and go
            return self._table.ready_names(self.settings.load_model)
        return self._table.all_ready()

    def in_flight(self, names: Collection[str] = ()) -> int:
        """How many requests of these models wait or run; without names of all, and an ensemble's beside its steps."""
        return sum(model.in_flight for model in self._table.loaded() if not names or model.name in names)

    @property
    def loads_on_demand(self) -> bool:
        """Whether :meth:`model` may raise :class:`LoadNeeded`."""
        return self._on_demand is not None

    def metadata(self) -> dict[str, Any]:
        """The body of ``GET /v2``; ``version`` is that of the Triton whose behaviour the server keeps."""
        return {
            "name": self.settings.id,
            "version": SERVER_VERSION,
            "extensions": list(EXTENSIONS),
            "conch_version": __version__,
        }

    def model(self, name: str, version: int = -1) -> Model:
        """A model that serves; raises NOT_FOUND or UNAVAILABLE for one that does not.

        In on-demand mode, what is raised may be :class:`LoadNeeded`, with which the request waits for the model.
        """
        try:
            return self._table.named(name, version)
        except ConchError as missing:
            if self._on_demand is None:
                raise
            raise self._on_demand.needed(name, missing) from None

    def versions_of(self, name: str) -> list[Model]:
        """The versions of a model that serve; none for one that does not."""
        return [model for model in self._table.loaded() if model.name == name]

    async def loaded_model(self, name: str, version: int = -1) -> Model:
        """A model that serves, for which the caller waits while it is loaded on demand."""
        while True:
            try:
                return self.model(name, version)
            except LoadNeeded as needed:
                await needed.wait()

    def model_metadata(self, name: str, version: int = -1) -> dict[str, Any]:
        """The body of ``GET /v2/models/<name>``: with all versions that are ready unless one is named."""
        model = self.model(name, version)
        metadata = model.metadata
        if version == -1:
            metadata["versions"] = [str(ready) for ready in self._table.models[model.key].ready_versions()]
        return metadata

    def model_ready(self, name: str, version: int = -1) -> bool:
        """Whether requests to the model can run now, or when it has been loaded on demand; False for an unknown one."""
        try:
            return self._table.is_ready(self._table.named(name, version))
        except ConchError as missing:
            return self._can_be_loaded(name, missing)

    def _can_be_loaded(self, name: str, missing: ConchError) -> bool:
        demand = self._on_demand
        return demand is not None and demand.can_serve(name) and isinstance(demand.needed(name, missing), LoadNeeded)

    async def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """One entry per version, by name and version; a directory that was never loaded has its name alone."""
        directories = [] if ready_only else await self.repository.listed()
        if self._on_demand is not None and not ready_only:
            self._on_demand.known = frozenset(directories)
        return self._table.index(directories, ready_only)

    async def public_index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """The index for clients of other processes, with reasons that do not name directories of this machine."""
        entries = await self.index(ready_only)
        for entry in entries:
            if "reason" in entry:
                entry["reason"] = without_directories(entry["reason"])
        return entries

    def ready_models(self) -> list[str]:
        """The names of the models of which a version serves, or could be loaded on demand."""
        serving = self._table.serving_names()
        if self._on_demand is not None:
            serving |= set(filter(self._on_demand.can_serve, self._on_demand.known))
        return sorted(serving)

    def signature(self, name: str) -> ModelSignature | None:
        """What a model takes and gives; None where it could be loaded on demand and has never been.

        Raises NOT_FOUND or UNAVAILABLE for one that does not serve and cannot be loaded on demand.
        """
        try:
            return self.model(name).signature
        except LoadNeeded:
            assert self._on_demand is not None
            return self._on_demand.signature(name)

    def statistics(self, name: str = "", version: int = -1) -> list[dict[str, Any]]:
        """Statistics of one version, of all ready versions of a model, or of all models."""
        return [statistics.snapshot() for statistics in self.counters(name, version)]

    def counters(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """Whose snapshots these are: of many models they take a while, and need not be taken at once."""
        self.ledger.refresh()
        if not name:
            return [one.statistics for one in sorted(self._table.loaded(), key=attrgetter("name", "version"))]
        serving = [models for key in self._table.keys(name) if (models := self._table.models[key].models())]
        models = serving[0] if len(serving) == 1 else []
        if not models:
            raise invalid(f"requested model '{name}' is not available")
        chosen = [model for model in models if version in (-1, model.version)]
        if not chosen:
            raise invalid(f"requested model version is not available for model '{name}'")
        return [model.statistics for model in chosen]

    def require_explicit_control(self) -> None:
        """Raises UNAVAILABLE unless models are loaded and unloaded on request; begins as Triton does in both modes."""
        if (mode := self.settings.model_control_mode) in ("none", "poll"):
            more = "" if mode == "poll" else "; this server runs with --model-control-mode=none: start it with explicit"
            raise unavailable(f"explicit model load / unload is not allowed if polling is enabled{more}")

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model, from the repository or with a configuration (JSON) and files of the client's.

        Raises INVALID_ARG for a load that brings more than ``--model-load-overrides`` allows.
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
        """Load or reload a model with the parameters ``config`` (str) and ``file:<path>`` (bytes) of a model."""
        self.require_explicit_control()
        check_model_name(name)
        if self._on_demand is not None:
            await self._on_demand.load(name, parameters)
            return
        await self._lifecycle.load_named(name, read_parameters(name, parameters))

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model, even if the caller is cancelled; does nothing for one that is not loaded."""
        self.require_explicit_control()
        check_model_name(name)
        if self._on_demand is None:
            await self._lifecycle.complete(self._lifecycle.unload_named(name, dependents))
        else:
            await self._lifecycle.complete(self._on_demand.unload(name, dependents))

    def _worker_families(self) -> Iterator[Family]:
        """Which models are ready, and how many workers had to be killed."""
        yield families.readiness(
            (model.name, model.namespace, model.version, model.ready) for model in self._table.loaded()
        )
        yield families.template_memory(self.ledger.template_bytes)
        yield families.kills((model, cause.value, count) for (model, cause), count in self._processes.kills.items())

    def check_traced(self, name: str) -> None:
        """Raises INVALID_ARG unless the model, whose trace setting is wanted, serves; an empty name stands for all."""
        if name and name not in self.ready_models():
            raise invalid(f"Request for unknown model : {name}")

    def update_logs(self, changes: Mapping[str, Any]) -> None:
        """Change what is logged, here and in the workers."""
        logs.current().update(**changes)
        levels = log_levels()
        for model in self._table.loaded():
            model.executor.set_log(levels)

    # Called by the application.

    async def load_startup_models(self) -> dict[str, ConchError]:
        """Load the models that the control mode asks for at start.  Returns the errors of failed ones by name."""
        wanted: list[str] = []
        named = self.settings.model_control_mode in ("explicit", "on-demand")
        if not named or self.settings.load_model == ("*",):
            wanted = await self.repository.listed()
        else:
            wanted = await self.repository.aside(partial(self.repository.keys_of, self.settings.load_model))
        for path in await self.repository.aside(self.repository.unnameable):
            LOG.warning("%s is left out: the name of a model must be UTF-8", shown_name(str(path)))
        self._table.starting = frozenset(wanted)
        if not wanted:
            self._say_why_there_are_no_models()
        if self._polling is not None:
            await self._polling.look()
        if self._on_demand is not None:
            self._on_demand.start(self.settings.repository_poll_secs)
            await self._on_demand.refresh()
        failed = await self._lifecycle.load_all(wanted)
        self._table.starting = frozenset()
        self._initialised = True
        if self._polling is not None:
            self._polling.note(wanted, failed)
            self._polling.start()
        return failed

    async def load_anew(self, names: Sequence[str]) -> dict[str, ConchError]:
        """Load models of the repository whose files are new or others; returns the errors of failed ones by name."""
        return await self._lifecycle.load_all(list(names))

    async def unload_removed(self, name: str) -> None:
        """Stop serving a model whose files have gone, or are others when a request asks for it again."""
        if self._on_demand is None:
            await self._lifecycle.unload(name)
        else:
            await self._on_demand.unload(name, dependents=False)

    def _say_why_there_are_no_models(self) -> None:
        if self.settings.model_control_mode == "explicit" and not self.settings.load_model:
            LOG.info("no model is loaded at the start: clients load models, or --load-model names them")
            return
        if self.settings.model_control_mode == "on-demand":
            LOG.info("no model is loaded at the start: each is loaded when a request asks for it")
            return
        LOG.warning(
            "the model repository is empty: %s has no folder of a model (NAME/1/model.py, NAME/1/model.json …)",
            ", ".join(self.settings.model_repository),
        )

    def model_rows(self) -> list[tuple[str, str, str]]:
        """Name, version and status of every model, for the table that is logged at start."""
        return self._table.rows()

    async def stop(self, seconds: float) -> bool:
        """Refuse new requests, finish the others for at most ``seconds``, end all models; False when time ran out."""
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
        used = bool(models) or self._table.starting is not None  # else its ports were taken
        if used:
            LOG.info("Waiting for in-flight requests to complete.")
        in_time = True
        # Models end after those that call them, which may have been replaced: ensembles and models with BLS.
        while busy := [
            *(model for model in models if model.in_use),
            *(model for model in self._rollout.retiring if model.in_flight),
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
            # Whoever is not to blame for that still gets to finalize its model.
            for model in models:
                model.abandon()
            timeout = min(self.settings.finalize_timeout_secs, self.settings.exit_timeout_secs)
        await end_all("end a model", *(model.stop(timeout) for model in models))
        ended = await self._rollout.finish(max(deadline - loop.time(), 0.0))
        await self._processes.close()
        await self._templates.close()
        await self._rollout.dispose_all()
        if self._cache is not None:
            await self._cache.close()
        await self._environments.close()
        return ended and in_time
