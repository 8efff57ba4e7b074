"""What channels share: where the server is, and the connection that is made when it is needed.

Runs on the event loop of a process that sends.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final

from conch.addresses import host_and_port
from conch.errors import invalid

#: How long a connection may take to be made (s).
CONNECT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens; ``encrypted`` says by TLS, ``verified`` that its certificate is checked.

    ``named`` says that the certificate has to be for ``host``.  ``authorities`` is a file with the certificates that
    are trusted (empty: the system's); ``certificate`` and ``key`` are files with the client's own (PEM).
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

    def tls(self, *protocols: str) -> ssl.SSLContext | None:
        """How to encrypt, with the application protocols to agree on.  Raises INVALID_ARG for files that do not do."""
        if not self.encrypted:
            return None
        try:
            context = ssl.create_default_context(cafile=self.authorities or None)
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"{self.authorities}: no certificates of authorities: {error}") from None
        context.check_hostname = self.verified and self.named
        if not self.verified:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise invalid(f"{self.certificate}: no certificate of a client: {error}") from None
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


class Connecting(asyncio.Protocol):
    """A connection that is made again when it is lost; ``transport`` is None while there is none."""

    #: The application protocols that TLS offers.
    protocols: tuple[str, ...] = ()

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self._address = address
        self._connecting: asyncio.Task[None] | None = None

    # Implemented by subclasses

    def on_connected(self) -> None:
        """There is a connection."""
        raise NotImplementedError

    def on_lost(self, error: str) -> None:
        """The connection has ended, or could not be made."""
        raise NotImplementedError

    # Called by subclasses and their owners

    def connect(self) -> None:
        """Make the connection, unless that is going on."""
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())

    def write(self, data: bytes) -> bool:
        """Give ``data`` to the kernel now, as far as it has room; returns whether it has all of it.

        ``resume_writing`` is called when it has the rest.
        """
        transport = self.transport
        if transport is None:
            return False
        transport.write(data)
        return not transport.get_write_buffer_size()

    def close(self) -> None:
        """End the connection; nobody is told."""
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
        # Then it gives what it gets to the kernel at once, and not at the end of the loop's turn.
        self.transport.set_write_buffer_limits(0)
        # Now, and not when the task goes on: the server may speak first, and that must not be read before.
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
