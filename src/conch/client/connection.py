"""A connection of ``http.client`` with one deadline for a whole request.

The timeout of the standard library applies to each read, so a server that sends an occasional byte could block a call
forever.
"""

from __future__ import annotations

import io
import select
import ssl
from http import HTTPStatus
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPResponse
from socket import IPPROTO_TCP, SHUT_RDWR, SOCK_STREAM, TCP_NODELAY, create_connection, getaddrinfo, socket
from typing import Any, NamedTuple

from conch.client.deadline import NO_DEADLINE
from conch.core.errors import invalid


class TlsFiles(NamedTuple):
    """Files (PEM) for an encrypted connection: trusted certificates, and a client certificate with its key.

    Empty names mean the system's authorities and no client certificate.
    """

    authorities: str = ""
    certificate: str = ""
    key: str = ""

    def context(self, *, verified: bool = True, named: bool = True) -> ssl.SSLContext:
        """Return a client's TLS context.  Raises INVALID_ARG for unusable files.

        ``verified`` is whether the server's certificate is checked, ``named`` whether it must match the host.
        """
        try:
            context = ssl.create_default_context(cafile=self.authorities or None)
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"{self.authorities}: no certificates of authorities: {error}") from None
        context.check_hostname = verified and named
        if not verified:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise invalid(f"{self.certificate}: no certificate of a client: {error}") from None
        return context


class FinalResponse(HTTPResponse):
    """A response after any interim responses; the standard library skips only 100 Continue."""

    def begin(self) -> None:
        super().begin()
        while self.status < 200 and self.status != HTTPStatus.SWITCHING_PROTOCOLS:
            self.headers = self.msg = None  # type: ignore[assignment]  # otherwise nothing more is read
            super().begin()


class DeadlineConnection(HTTPConnection):
    """A connection to ``host:port``, encrypted with ``tls``. ``deadline`` may be changed between requests.

    After the deadline, blocking calls raise TimeoutError; the connection must then be closed.
    """

    response_class = FinalResponse

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self.default_port = HTTP_PORT if tls is None else HTTPS_PORT
        self.deadline = NO_DEADLINE
        self._tls = tls
        self._connected: socket | None = None

    def connect(self) -> None:
        connected = self._socket()
        try:
            connected.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            if self._tls is not None:
                connected.settimeout(self.deadline.left())
                connected = self._tls.wrap_socket(connected, server_hostname=self.host)
        except BaseException:
            connected.close()
            raise
        self._connected = connected
        self.sock: Any = _DeadlineSocket(connected, self)

    @property
    def stale(self) -> bool:
        """Whether the connection is readable before a request: the server has closed it, or sent garbage."""
        if self._connected is None:
            return True
        poll = select.poll()
        poll.register(self._connected, select.POLLIN)
        return bool(poll.poll(0))

    def shutdown(self) -> None:
        """Shut down the socket, which wakes a thread that reads the response. Any thread may call. Raises OSError."""
        if self._connected is not None:
            self._connected.shutdown(SHUT_RDWR)

    def _socket(self) -> socket:
        """Connect to the first address of the host that accepts.  Raises OSError."""
        failed: OSError | None = None
        for *_, address in getaddrinfo(self.host, self.port, type=SOCK_STREAM):
            try:
                return create_connection((str(address[0]), int(address[1])), self.deadline.left())
            except OSError as error:
                failed = error
        raise failed or OSError(f"{self.host} has no address")


class _DeadlineSocket:
    """The part of a socket that ``http.client`` uses; each call ends at the connection's deadline."""

    def __init__(self, connected: socket, connection: DeadlineConnection) -> None:
        self._socket = connected
        self._connection = connection

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(self._connection.deadline.left())
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._socket, self._connection))  # the response keeps it after close()

    def close(self) -> None:
        self._socket.close()


class _DeadlineReader(io.RawIOBase):
    """Reads a response until the connection's deadline."""

    def __init__(self, connected: socket, connection: DeadlineConnection) -> None:
        self._socket = connected
        self._connection = connection
        self._file = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._connection.deadline.left())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
