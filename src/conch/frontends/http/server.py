"""Listens for HTTP connections.  Used for the inference port and for the metrics port."""

from __future__ import annotations

import asyncio
from time import monotonic

from conch.frontends.http.connection import HttpApplication, HttpConnection
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.listening import listen
from conch.telemetry.metrics import Registry
from conch.wire.json.control import error_body

#: Connections on which nothing has happened for this long (s) are closed.
IDLE_SECONDS = 600.0
_SWEEP_SECONDS = 30.0


class HttpListener:
    """A port and its connections."""

    def __init__(self, application: HttpApplication) -> None:
        self._application = application
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> tuple[str, int]:
        """Listen; returns the address.  Raises PortTakenError."""
        self._server, address = await listen(
            lambda: HttpConnection(self._application, self._connections), host, port, reuse_port=reuse_port
        )
        self._sweep = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._close_idle)
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

    def _close_idle(self) -> None:
        oldest = monotonic() - IDLE_SECONDS
        for connection in list(self._connections):
            if connection.idle and connection.active < oldest:
                connection.transport.abort()
        self._sweep = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._close_idle)


class MetricsPage:
    """The application of the metrics port: ``GET /metrics`` and nothing else."""

    _TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def handle(self, exchange: HttpExchange) -> None:
        if exchange.method != b"GET":
            exchange.respond(405, [JSON], error_body("Method Not Allowed"))
        elif exchange.path == b"/metrics":
            exchange.respond(200, [self._TEXT], self._registry.render())
        else:
            exchange.respond(200, [self._TEXT])

    def body_limit(self, exchange: HttpExchange) -> int:
        return 0

    def too_large(self, size: int, limit: int) -> str:
        return "the metrics port takes no request bodies"

    def error_body(self, message: str) -> bytes:
        return error_body(message)
