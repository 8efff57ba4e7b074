"""An HTTP/1.1 connection over a blocking socket with one deadline for a whole request, and the files of encryption."""

from __future__ import annotations

import os
import select
import ssl
from collections.abc import Sequence
from pathlib import Path
from socket import IPPROTO_TCP, SHUT_RDWR, SOCK_STREAM, TCP_NODELAY, create_connection, gaierror, getaddrinfo, socket
from typing import Final, NamedTuple

from conch.client.deadline import NO_DEADLINE, Deadline
from conch.client.http1 import HttpResponse, ResponseReader
from conch.core.errors import invalid
from conch.core.tensors import Buffer

#: Maximum size of a read (bytes): by default, and for a body of known length, which takes less time with large reads.
_READ_SIZE: Final = 64 << 10
_BODY_READ_SIZE: Final = 1 << 20


class TlsContents(NamedTuple):
    """The contents of :class:`TlsFiles` for the gRPC library, and a TLS context made from them.

    ``authorities`` None means the system's authorities; ``certificate`` and ``key`` None mean no client certificate.
    """

    authorities: bytes | None = None
    key: bytes | None = None
    certificate: bytes | None = None
    context: ssl.SSLContext | None = None


class TlsFiles(NamedTuple):
    """Files (PEM) for an encrypted connection: trusted certificates, and a client certificate with its key.

    Empty names mean the system's authorities and no client certificate.
    """

    authorities: str = ""
    certificate: str = ""
    key: str = ""

    def context(self, *, verified: bool = True, named: bool = True) -> ssl.SSLContext:
        """Return a client's TLS context. Raises INVALID_ARG for unusable files.

        ``verified`` is whether the server's certificate is checked, ``named`` whether it must match the host.
        """
        try:
            context = ssl.create_default_context(cafile=self.authorities or None)
        except (OSError, ssl.SSLError) as error:
            raise invalid(f"{self.authorities} cannot be used as CA certificates: {error}") from None
        context.check_hostname = verified and named
        if not verified:
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise invalid(f"{self.certificate} cannot be used as a client certificate: {error}") from None
        return context

    def contents(self) -> TlsContents:
        """Read the files. Raises INVALID_ARG for unusable files, which the gRPC library does not report."""
        context = self.context()
        names = (self.authorities, self.key if self.certificate else "", self.certificate)
        authorities, key, certificate = (Path(name).read_bytes() if name else None for name in names)
        return TlsContents(authorities, key, certificate, context)


class BlockingConnection:
    """A connection to ``host:port``, encrypted with ``tls``, for one request at a time; made by ``deadline``.

    After the deadline of a request, blocking calls raise TimeoutError; the connection must then be closed. The
    constructor raises OSError, and UnicodeError for an impossible host name.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self.reader = ResponseReader()
        self._deadline = deadline
        self._socket = _connected(host, port, deadline)
        try:
            self._socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(deadline.left())
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        except BaseException:
            self._socket.close()
            raise

    @property
    def stale(self) -> bool:
        """Whether the connection is readable before a request: the server has closed it, or sent garbage."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, parts: Sequence[Buffer], deadline: Deadline = NO_DEADLINE) -> None:
        """Send a request; ``deadline`` is also that of its response. Raises OSError."""
        self._deadline = deadline
        self.reader.begin()
        self._socket.settimeout(deadline.left())
        self._socket.sendall(b"".join(parts))

    def receive(self) -> None:
        """Pass the next bytes to the reader. Raises OSError and HttpFault."""
        self._socket.settimeout(self._deadline.left())
        data = self._socket.recv(_BODY_READ_SIZE if b"content-length" in self.reader.headers else _READ_SIZE)
        if data:
            self.reader.feed(data)
        else:
            self.reader.end()

    def response(self) -> HttpResponse:
        """Return the response when it is complete. Raises OSError and HttpFault."""
        while not self.reader.complete:
            self.receive()
        return self.reader.response()

    def shutdown(self) -> None:
        """Shut down the socket, which wakes a thread that reads the response. Any thread may call. Raises OSError."""
        self._socket.shutdown(SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _connected(host: str, port: int, deadline: Deadline) -> socket:
    """Connect to the first address of the host that accepts. Raises OSError."""
    failed: OSError | None = None
    for *_, address in getaddrinfo(host, port, type=SOCK_STREAM):
        try:
            return create_connection((str(address[0]), int(address[1])), deadline.left())
        except OSError as error:
            failed = error
    raise failed or OSError(f"{host} has no address")


def connect_failure(error: Exception, host: str) -> str:
    """Return the reason why no connection to ``host`` was made: an OSError or UnicodeError."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case ssl.SSLError():
            return f"no encrypted connection: {error.reason or error}"
        case gaierror() | UnicodeError():
            return f"no connection: no address is known for '{host}'"
        case OSError(errno=int(number)):
            return f"no connection: {os.strerror(number)}"
    return f"no connection: {error}"
