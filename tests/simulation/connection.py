"""The ends of simulated connections, for clients and for servers of all protocols.

Both send little data, so they ignore a full transport buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conch.core.errors import unavailable
from conch.core.inference import InferResponse

#: Called with each response to a request.
OnResponse = Callable[[InferResponse], None]
#: How a request ends if the server closes its connection before it has responded.
CONNECTION_LOST = unavailable("the connection was closed before the request was answered")


class ClientConnection(asyncio.Protocol):
    """Sends data as soon as it is connected; ``lost`` is set when the connection has ended."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: Any = None
        self._unsent: list[bytes] = []
        self._gone = False

    def hang_up(self) -> None:
        """Close the connection without waiting for responses."""
        self._gone = True
        self.forget()
        if self._transport is not None:
            self._transport.abort()

    def forget(self) -> None:
        """Expect no more responses."""
        raise NotImplementedError

    def refused(self) -> None:
        """Handle a server that does not accept connections."""
        self.connection_lost(None)

    def _send(self, data: bytes) -> None:
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._transport.write(data)

    # Called by the transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._gone:
            transport.abort()
        for data in self._unsent:
            transport.write(data)
        self._unsent.clear()


class ServerConnection(asyncio.Protocol):
    """The server's end of a connection; it is in ``connections`` while it is open."""

    transport: Any

    def __init__(self, connections: set[ServerConnection]) -> None:
        self._connections = connections

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
