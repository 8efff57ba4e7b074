"""Binds the TCP ports of the HTTP and gRPC front ends, on the event loop."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from math import inf
from ssl import SSLContext
from typing import Final

from conch.core.errors import ConchError, internal

_BACKLOG: Final = 1024
#: Maximum duration of a TLS handshake (s).
_LONGEST_HANDSHAKE: Final = 60.0


class PortTakenError(ConchError):
    """INTERNAL: ``port`` is already in use; the message is Triton's, with a trailing space."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"Socket '{host}:{port}' already in use ")
        self.port = port


async def listen(
    factory: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    ssl: SSLContext | None = None,
    handshake_seconds: float = inf,
) -> tuple[asyncio.Server, tuple[str, int]]:
    """Listen on ``host:port`` (port 0: any free port); returns the server and its address.

    ``factory`` creates the protocol of each connection; with ``ssl``, after its handshake, which may take
    ``handshake_seconds``. Raises PortTakenError, or INTERNAL for any other failure.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            factory,
            host,
            port,
            ssl=ssl,
            backlog=_BACKLOG,
            reuse_port=reuse_port or None,
            ssl_handshake_timeout=min(handshake_seconds, _LONGEST_HANDSHAKE) if ssl is not None else None,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(host, port) from error
        raise internal(f"{host}:{port}: {error}") from error
    address: tuple[str, int] = server.sockets[0].getsockname()[:2]
    return server, address
