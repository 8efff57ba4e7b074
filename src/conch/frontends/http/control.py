"""HTTP handlers for health, metadata, configuration, repository, statistics, logging, tracing and shared memory.

The router calls them on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from conch.core.errors import invalid, unavailable, unsupported
from conch.core.tensors import Buffer
from conch.frontends.http.background_tasks import respond_after, start_work
from conch.frontends.http.exchange import JSON, PLAIN, HttpExchange
from conch.frontends.loop_budget import YieldingLister
from conch.frontends.offloading.offloader import LARGE_BYTES, Offloader
from conch.server.core import InferenceServer
from conch.server.regions import KINDS, ClientRegion, ClientRegions, SystemRegion
from conch.telemetry.statistics import ModelStatistics
from conch.wire.json import control as wire
from conch.wire.json.text import dumps


class RegionRoutes:
    """The handlers for one kind of shared memory region. A path without a region has the empty name."""

    def __init__(self, regions: ClientRegions, kind: type[ClientRegion]) -> None:
        self._regions = regions
        self._kind = kind

    def status(self, exchange: HttpExchange, name: str) -> None:
        exchange.respond(200, [JSON], dumps(self._regions.status(self._kind, name)))

    def register(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        if not name:
            kind = KINDS[self._kind].lower()
            raise invalid(f"'region name' is necessary to register {kind} shared memory region")
        start_work(exchange, respond_after(exchange, self._register(name, exchange.body)))

    async def _register(self, name: str, body: Buffer) -> None:
        if self._kind is SystemRegion:
            await self._regions.register_system(name, *wire.read_system_region(body))
        else:
            self._regions.register_cuda(name, *wire.read_cuda_region(body))

    def unregister(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        self._regions.unregister(self._kind, name)
        exchange.respond(200, [JSON])


_REPOSITORY: Final = "'repository_name' specification is not supported"


class ControlRoutes:
    """The control handlers; each responds to its exchange, immediately or later, or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader, lister: YieldingLister) -> None:
        self._server = server
        self._lister = lister
        self._offloader = offloader

    def live(self, exchange: HttpExchange) -> None:
        self._refuse_if_exiting()
        exchange.respond(200 if self._server.live else 400, [PLAIN])

    def ready(self, exchange: HttpExchange) -> None:
        self._refuse_if_exiting()
        exchange.respond(200 if self._server.ready else 400, [PLAIN])

    def model_ready(self, exchange: HttpExchange, name: str, version: int) -> None:
        self._refuse_if_exiting()
        if self._server.model_ready(name, version):
            exchange.respond(200, [PLAIN])
        else:
            exchange.respond(400, [JSON], wire.error_body("Model version not ready"))

    def server_metadata(self, exchange: HttpExchange) -> None:
        exchange.respond(200, [JSON], dumps(self._server.metadata()))

    def model_metadata(self, exchange: HttpExchange, name: str, version: int) -> None:
        exchange.respond(200, [JSON], dumps(self._server.model_metadata(name, version)))

    def config(self, exchange: HttpExchange, name: str, version: int) -> None:
        exchange.respond(200, [JSON], self._server.model(name, version).config_json)

    def statistics(self, exchange: HttpExchange, name: str = "", version: int = -1) -> None:
        start_work(exchange, self._respond_with_statistics(exchange, self._server.counters(name, version)))

    def index(self, exchange: HttpExchange) -> None:
        start_work(exchange, self._respond_with_index(exchange, wire.read_index(exchange.body)))

    def admit(self, repository: str, name: str) -> None:
        """Raise UNSUPPORTED or UNAVAILABLE for a load or unload that cannot be allowed."""
        if repository:
            raise unsupported(_REPOSITORY)
        self._server.require_explicit_control()

    def load(self, exchange: HttpExchange, repository: str, name: str) -> None:
        if repository:
            raise unsupported(_REPOSITORY)
        # For a small body, Triton reports errors in the body first; for a large one, the router has called ``admit``.
        # A load that has begun continues without its client.
        start_work(exchange, self._load(exchange, name), cancel_on_disconnect=len(exchange.body) > LARGE_BYTES)

    def unload(self, exchange: HttpExchange, repository: str, name: str) -> None:
        self.admit(repository, name)
        dependents, adapter = wire.read_unload(exchange.body)
        unloading = self._server.unload_adapter(adapter, name) if adapter else self._server.unload(name, dependents)
        start_work(exchange, respond_after(exchange, unloading))

    def log_settings(self, exchange: HttpExchange) -> None:
        exchange.respond(200, [JSON], dumps(self._server.logs.extension))

    def change_log_settings(self, exchange: HttpExchange) -> None:
        self._server.update_logs(wire.read_log_settings(exchange.body))
        self.log_settings(exchange)

    def trace_setting(self, exchange: HttpExchange, model: str = "") -> None:
        self._server.check_traced(model)
        exchange.respond(200, [JSON], dumps(self._server.tracing.shown(model)))

    def change_trace_setting(self, exchange: HttpExchange, model: str = "") -> None:
        self._server.check_traced(model)
        self._server.tracing.update(model, wire.read_trace_setting(exchange.body))
        self.trace_setting(exchange, model)

    def _refuse_if_exiting(self) -> None:
        if self._server.exiting:
            raise unavailable("Server exiting")

    async def _respond_with_statistics(self, exchange: HttpExchange, models: Iterable[ModelStatistics]) -> None:
        entries = await self._lister.all(dumps(model.snapshot()) for model in models)
        exchange.respond(200, [JSON], wire.statistics_body(entries))

    async def _respond_with_index(self, exchange: HttpExchange, ready_only: bool) -> None:
        exchange.respond(200, [JSON], dumps(await self._lister.one(self._server.public_index(ready_only))))

    async def _load(self, exchange: HttpExchange, name: str) -> None:
        body, exchange.body = exchange.body, b""
        decoding = self._offloader.run(len(body), wire.read_load, body)
        del body
        parameters = await decoding
        exchange.on_disconnect = None
        if parameters.lora_name:
            self._server.require_explicit_control()
            await self._server.load_adapter(parameters.lora_name, parameters.lora_path, name, in_place=True)
            exchange.respond(200, [JSON])
            return
        files = {path: bytes(data) for path, data in parameters.files.items()}
        await self._server.load(name, parameters.config, files)
        exchange.respond(200, [JSON])
