"""One HTTP request and its response, as handlers see them.

Belongs to the connection that made it (``connection.py``) and lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from conch.tensors import Buffer

if TYPE_CHECKING:
    from conch.frontends.http.connection import HttpConnection

Headers = Iterable[tuple[bytes, bytes]]

_STATUS_LINE = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
#: Below this a response goes out as one buffer; above it joining would cost more than it saves.
_JOIN_BELOW = 32 * 1024


class Exchange:
    """A request that arrived in full, and the means to answer it.

    ``path`` is the raw target without its query, ``headers`` have lower-case names (the last of
    equal ones wins), ``body`` is the whole body, after chunked framing and before decompression.
    Answer with :meth:`respond`, or :meth:`start`, :meth:`write` … and :meth:`finish`.  When the
    client goes away first, ``on_disconnect`` is called and answers are dropped.
    """

    __slots__ = (
        "_connection",
        "body",
        "headers",
        "keep_alive",
        "method",
        "on_disconnect",
        "path",
        "started",
    )

    def __init__(
        self, connection: HttpConnection, method: bytes, path: bytes, headers: dict[bytes, bytes], keep_alive: bool
    ) -> None:
        self._connection: HttpConnection | None = connection
        self.method = method
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.body: Buffer = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.started = False

    def respond(self, status: int, headers: Headers, *body: Buffer) -> None:
        """Send a complete response; ``body`` may come in parts, which are not copied when they are large."""
        connection = self._connection
        if connection is None:
            return
        length = sum(map(len, body))
        head = self._head(status, headers, b"Content-Length: %d\r\n\r\n" % length)
        self.started = True
        if self.method == b"HEAD":
            connection.transport.write(head)
        elif length < _JOIN_BELOW:
            connection.transport.write(b"".join((head, *body)))
        else:
            connection.transport.writelines([head, *body])
        self._end(connection)

    def start(self, status: int, headers: Headers) -> None:
        """Begin a response of unknown length."""
        if self._connection is not None:
            self.started = True
            self._connection.transport.write(self._head(status, headers, b"Transfer-Encoding: chunked\r\n\r\n"))

    def write(self, data: bytes) -> None:
        """Send a part of a response that :meth:`start` began."""
        if self._connection is not None and data:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        """End a response that :meth:`start` began."""
        connection = self._connection
        if connection is not None:
            connection.transport.write(b"0\r\n\r\n")
            self._end(connection)

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client has not taken yet."""
        return self._connection.transport.get_write_buffer_size() if self._connection else 0

    @property
    def gone(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self._connection is None

    def abort(self) -> None:
        """Close the connection without a proper end, so that the client knows that something is missing."""
        if self._connection is not None:
            self._connection.transport.abort()

    def disconnected(self) -> None:
        """The client is gone; called by the connection."""
        self._connection = None
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        lines = [_STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if not self.keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(framing)
        return b"".join(lines)

    def _end(self, connection: HttpConnection) -> None:
        self._connection = None
        self.on_disconnect = None
        connection.exchange_ended(self)
