"""Listens for HTTP connections.  Used for the inference port and for the metrics port."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from ssl import SSLContext
from time import monotonic

from conch.errors import ConchError
from conch.frontends.http.connection import HttpConnection
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.reader import HttpApplication
from conch.frontends.http.status import refuse
from conch.frontends.http.tasks import ExchangeTasks
from conch.frontends.limits import SWEEP_SECONDS, ClientLimits
from conch.frontends.listening import listen
from conch.frontends.slices import Slices
from conch.telemetry.metrics import Registry


class HttpListener:
    """A port and its connections, which keep to ``limits``."""

    def __init__(self, application: HttpApplication, limits: ClientLimits) -> None:
        self._application = application
        self._limits = limits
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> Collection[HttpConnection]:
        """The connections that are open."""
        return self._connections

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, ssl: SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen; returns the address.  Raises PortTakenError."""
        self._server, address = await listen(
            lambda: HttpConnection(self._application, self._connections, self._limits),
            host,
            port,
            reuse_port=reuse_port,
            ssl=ssl,
            handshake_seconds=self._limits.times.head,
        )
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_again)
        return address

    def refuse_new(self) -> None:
        """Accept no further connections."""
        if self._server is not None:
            self._server.close()

    async def stop(self, seconds: float) -> None:
        """Stop listening; wait at most ``seconds`` for responses that are due, then close the other connections."""
        self.refuse_new()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.shut_down()
        deadline = monotonic() + seconds
        while self._connections and monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connections of clients that have taken too long at ``now`` (s, monotonic)."""
        for connection in list(self._connections):
            connection.sweep(now)

    def _sweep_again(self) -> None:
        """Look at all connections: one timer for all of them."""
        self.sweep(monotonic())
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_again)


class MetricsPage:
    """The application of the metrics port: ``GET /metrics`` and nothing else."""

    keeps_names = False
    _TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

    def __init__(self, registry: Registry, slices: Slices) -> None:
        self._registry = registry
        self._slices = slices
        self._tasks = ExchangeTasks(refuse)

    def open(self, exchange: HttpExchange) -> int:
        if exchange.method != b"GET":
            exchange.refusal = (ConchError("Method Not Allowed"), 405)
        exchange.urgent = True
        return 0

    def handle(self, exchange: HttpExchange) -> None:
        if exchange.path == b"/metrics":
            self._tasks.start(exchange, self._respond_with_page(exchange))
        else:
            exchange.respond(200, [self._TEXT])

    async def _respond_with_page(self, exchange: HttpExchange) -> None:
        lines = await self._slices.all(self._registry.lines())
        exchange.respond(200, [self._TEXT], "".join(lines).encode())

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        refuse(exchange, error, status)

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        return "the metrics port takes no request bodies"
