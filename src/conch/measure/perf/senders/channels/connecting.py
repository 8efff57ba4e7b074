"""The server's address, and the base of the channels: a connection that is established when needed.

Runs on the event loop of a sending process.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final

from conch.client.connection import TlsFiles
from conch.machine.ports import check_listens, host_and_port

#: Timeout for establishing a connection (s).
CONNECT_SECONDS: Final = 10.0
#: The same for a connection that is closed at once (s).
_LISTEN_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server; ``encrypted`` is whether it uses TLS, ``verified`` whether its certificate is checked.

    ``named`` is whether the certificate must match ``host``. ``authorities`` is a file with trusted certificates
    (empty: those of the system). ``certificate`` and ``key`` are files of the client's own certificate (PEM).
    """

    host: str
    port: int
    encrypted: bool = False
    verified: bool = True
    named: bool = True
    authorities: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def shown(self) -> str:
        """``host:port``, as in a URL."""
        return host_and_port(self.host, self.port)

    @property
    def files(self) -> TlsFiles:
        """The files for an encrypted connection."""
        return TlsFiles(self.authorities, self.certificate, self.key)

    def check_listens(self) -> None:
        """Raise UNAVAILABLE unless the address accepts connections."""
        check_listens(self.host, self.port, _LISTEN_SECONDS, f"no server responds at {self.shown}")

    def tls(self, *protocols: str) -> ssl.SSLContext | None:
        """Return a TLS context that offers ``protocols`` (ALPN), or None; raises INVALID_ARG for unusable files."""
        if not self.encrypted:
            return None
        context = self.files.context(verified=self.verified, named=self.named)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


class Connecting(asyncio.Protocol):
    """A connection that can be established again after it was lost; ``transport`` is None while disconnected."""

    #: The application protocols offered over TLS (ALPN).
    protocols: tuple[str, ...] = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self._address = address
        self._connecting: asyncio.Task[None] | None = None

    # Implemented by subclasses

    def on_connected(self) -> None:
        """Handle a new connection."""
        raise NotImplementedError

    def on_lost(self, error: str) -> None:
        """Handle the end of the connection, or a failed attempt to connect."""
        raise NotImplementedError

    # Called by subclasses and their owners

    def connect(self) -> None:
        """Start to connect, unless that is already in progress."""
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())

    def write(self, data: bytes) -> bool:
        """Write ``data`` to the kernel as far as its buffer allows; return whether all of it was written.

        ``resume_writing`` is called when the rest has been written.
        """
        transport = self.transport
        if transport is None:
            return False
        transport.write(data)
        return not transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection without a call of ``on_lost``."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.abort()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        assert self.transport is not None
        # The transport then writes data at once, not at the end of the loop iteration.
        self.transport.set_write_buffer_limits(0)
        # Done here, not when the task resumes: the server may send first, and its data must not be read before.
        self._connecting = None
        self.on_connected()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self.transport = None
            self.on_lost(f"the connection was lost: {exc}" if exc else "the server closed the connection")

    async def _connect(self) -> None:
        address = self._address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.loop.create_connection(
                    lambda: self, address.host, address.port, ssl=address.tls(*self.protocols)
                )
        except (OSError, TimeoutError) as failure:
            if self._connecting is asyncio.current_task():
                self._connecting = None
                self.on_lost(f"no connection to {address.shown}: {failure or 'timed out'}")
