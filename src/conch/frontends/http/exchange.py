"""One HTTP request and its response, as handlers see them.

Made by a connection (``connection.py``), which sends the response; lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from conch.frontends.access_log import AccessRecord
from conch.tensors import Buffer

#: A header that many responses have.
JSON: Final = (b"Content-Type", b"application/json")
Headers = Iterable[tuple[bytes, bytes]]

_STATUS_LINE = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
#: A body of fewer bytes goes out in one buffer with its head; for a larger one joining costs more than it saves.
_JOIN_BELOW = 32 * 1024


class ExchangeOwner(Protocol):
    """The connection of an exchange: it sends on ``transport``, and goes on with the next exchange."""

    transport: asyncio.Transport

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        """The response has been written."""


class HttpExchange:
    """A request that arrived in full, and the means to answer it.

    ``path`` is the raw target without its query, ``headers`` have lower-case names (the last of
    equal ones wins), ``body`` is the whole body, after chunked framing and before decompression.
    Answer with :meth:`respond`, or with :meth:`start`, :meth:`write` … and :meth:`finish`.  If the client hangs up
    first, ``on_disconnect`` is called, and what is sent after that is dropped.
    """

    __slots__ = (
        "_owner",
        "body",
        "headers",
        "keep_alive",
        "method",
        "on_disconnect",
        "path",
        "record",
        "started",
    )

    def __init__(
        self, owner: ExchangeOwner, method: bytes, path: bytes, headers: dict[bytes, bytes], keep_alive: bool
    ) -> None:
        self._owner: ExchangeOwner | None = owner
        self.method = method
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.body: Buffer = b""
        self.on_disconnect: Callable[[], None] | None = None
        self.started = False
        #: What verbose logging says of this exchange when it ends.
        self.record: AccessRecord | None = None

    def respond(self, status: int, headers: Headers, *body: Buffer) -> None:
        """Send a complete response; ``body`` may be given in parts, which are not copied if they are large."""
        owner = self._owner
        if owner is None:
            return
        length = sum(map(len, body))
        head = self._head(status, headers, b"Content-Length: %d\r\n\r\n" % length)
        self.started = True
        if self.record is not None:
            self.record.status, self.record.sent = status, length
        if self.method == b"HEAD":
            owner.transport.write(head)
        elif length < _JOIN_BELOW:
            owner.transport.write(b"".join((head, *body)))
        else:
            owner.transport.writelines([head, *body])
        self._end(owner)

    def start(self, status: int, headers: Headers) -> None:
        """Begin a response of unknown length."""
        if self._owner is not None:
            self.started = True
            if self.record is not None:
                self.record.status = status
            self._owner.transport.write(self._head(status, headers, b"Transfer-Encoding: chunked\r\n\r\n"))

    def write(self, data: bytes) -> None:
        """Send a part of a response that :meth:`start` began."""
        if self._owner is not None and data:
            if self.record is not None:
                self.record.sent += len(data)
            self._owner.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        """End a response that :meth:`start` began."""
        owner = self._owner
        if owner is not None:
            owner.transport.write(b"0\r\n\r\n")
            self._end(owner)

    @property
    def unsent(self) -> int:
        """Bytes of responses that wait until the client reads them."""
        return self._owner.transport.get_write_buffer_size() if self._owner else 0

    @property
    def gone(self) -> bool:
        """Whether the exchange has been answered, or its client has hung up."""
        return self._owner is None

    def abort(self) -> None:
        """Close the connection without ending the response, so that the client knows that something is missing."""
        if self._owner is not None:
            self._owner.transport.abort()

    def disconnect(self) -> None:
        """The client has hung up; called by the connection."""
        self._owner = None
        if self.record is not None:
            self.record.status = f"{self.record.status} client hung up".lstrip()
            self.record.log()
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

    def _end(self, owner: ExchangeOwner) -> None:
        self._owner = None
        if self.record is not None:
            self.record.log()
        self.on_disconnect = None
        owner.on_exchange_ended(self)
