"""The gRPC front end: listens, makes connections, drains them at shutdown.

Started and stopped by the server's wiring; everything runs on its event loop.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from conch.errors import internal
from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.frames import Http2ErrorCode
from conch.frontends.grpc.lifetime import Lifetime
from conch.frontends.grpc.service import GrpcService
from conch.frontends.grpc.tls import make_context
from conch.settings import Settings

if TYPE_CHECKING:
    from conch.server.core import Server

_BACKLOG: Final = 1024


class GrpcFrontend:
    """Serves ``server`` over gRPC, as ``settings`` say."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server = server
        self._settings = settings
        self._lifetimes: dict[Http2Connection, Lifetime] = {}
        self._listener: asyncio.Server | None = None
        self._all_gone = asyncio.Event()
        self._stopping = False

    @property
    def connections(self) -> Collection[Http2Connection]:
        """Those that are open."""
        return self._lifetimes.keys()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen on ``host:port`` (port 0: a free one) and return the address.

        Raises INTERNAL with Triton's text when the port is taken, INVALID_ARG for unusable TLS files.
        """
        loop = asyncio.get_running_loop()
        service = GrpcService(self._server, loop)

        context = make_context(self._settings)
        try:
            self._listener = await loop.create_server(
                lambda: Http2Connection(service, loop, self),
                host,
                port,
                ssl=context,
                backlog=_BACKLOG,
                reuse_port=self._settings.reuse_grpc_port or None,
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise internal(f"Socket '{host}:{port}' already in use " if taken else f"{host}:{port}: {error}") from error
        address: tuple[str, int] = self._listener.sockets[0].getsockname()[:2]
        return address

    async def stop(self, grace_seconds: float) -> None:
        """Take no more requests, let those that run finish for up to ``grace_seconds``, then cancel the rest."""
        self._stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._lifetimes):
            connection.drain()
        if self._lifetimes:
            self._all_gone.clear()
            try:
                await asyncio.wait_for(self._all_gone.wait(), grace_seconds)
            except TimeoutError:
                for connection in list(self._lifetimes):
                    connection.fail(Http2ErrorCode.NO_ERROR, "server is stopping")

    def on_connection_made(self, connection: Http2Connection) -> None:
        self._lifetimes[connection] = Lifetime(connection, self._settings)
        if self._stopping:
            connection.drain()

    def on_connection_lost(self, connection: Http2Connection) -> None:
        self._lifetimes.pop(connection).stop()
        if not self._lifetimes:
            self._all_gone.set()
