"""Clients' shared memory over HTTP: register, unregister, status, for both kinds of regions.

Called by the router; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from conch.errors import invalid
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.status import refuse
from conch.frontends.http.tasks import ExchangeTasks
from conch.server.regions.cuda import CudaRegion
from conch.server.regions.registry import ClientRegions
from conch.server.regions.system import SystemRegion
from conch.wire.json import control as wire


class _Handlers(NamedTuple):
    """The handlers of one kind of regions."""

    status: Callable[[HttpExchange, str], None]
    register: Callable[[HttpExchange, str], None]
    unregister: Callable[[HttpExchange, str], None]


class RegionRoutes:
    """The handlers; ``system`` and ``cuda`` have those of a kind, whose path names a region or not."""

    def __init__(self, regions: ClientRegions) -> None:
        self._regions = regions
        self._tasks = ExchangeTasks(refuse)
        self.system = _Handlers(self._system_status, self._register_system, self._unregister_system)
        self.cuda = _Handlers(self._cuda_status, self._register_cuda, self._unregister_cuda)

    def _system_status(self, exchange: HttpExchange, name: str) -> None:
        exchange.respond(200, [JSON], wire.document_body(self._regions.status(SystemRegion, name)))

    def _cuda_status(self, exchange: HttpExchange, name: str) -> None:
        exchange.respond(200, [JSON], wire.document_body(self._regions.status(CudaRegion, name)))

    def _register_system(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        if not name:
            raise invalid("'region name' is necessary to register system shared memory region")
        self._tasks.start(exchange, self._register(exchange, name, wire.read_system_region(exchange.body)))

    async def _register(self, exchange: HttpExchange, name: str, region: wire.SystemRegionParameters) -> None:
        await self._regions.register_system(name, *region)
        exchange.respond(200, [JSON])

    def _register_cuda(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        if not name:
            raise invalid("'region name' is necessary to register cuda shared memory region")
        self._regions.register_cuda(name, *wire.read_cuda_region(exchange.body))
        exchange.respond(200, [JSON])

    def _unregister_system(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        self._regions.unregister(SystemRegion, name)
        exchange.respond(200, [JSON])

    def _unregister_cuda(self, exchange: HttpExchange, name: str) -> None:
        self._regions.require()
        self._regions.unregister(CudaRegion, name)
        exchange.respond(200, [JSON])
