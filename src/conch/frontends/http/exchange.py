"""An HTTP request and its response, as seen by handlers.

A connection (``server.py``) creates the exchange and sends the response; everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from time import monotonic_ns
from typing import Any, Final, Protocol

from conch.core.errors import ConchError
from conch.core.tensors import Buffer
from conch.frontends.access_log import AccessRecord
from conch.frontends.budget import ByteBudget

#: Content type of JSON responses.
JSON: Final = (b"Content-Type", b"application/json")
PLAIN: Final = (b"Content-Type", b"text/plain")
Header = tuple[bytes, bytes]
Headers = Iterable[Header]

_STATUS_LINE = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_STATUS_LINE[529] = b"HTTP/1.1 529 Overloaded\r\n"  # Anthropic's
#: Below this size (bytes), head and body are sent in one buffer; for a larger body, joining costs more than it saves.
_JOIN_BELOW = 32 * 1024


class ExchangeOwner(Protocol):
    """The connection of an exchange; ``budget`` counts the bytes of bodies."""

    transport: asyncio.Transport
    budget: ByteBudget

    def write(self, data: bytes) -> None:
        """Send a part of a response, with more parts to follow."""

    def writelines(self, parts: list[Buffer]) -> None:
        """Send a large response in parts that are not copied."""

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        """Handle the end of an exchange; called when the response has been written."""


class HttpExchange:
    """A request and its response, once the request has arrived in full.

    ``path`` is the raw target without its ``query``, which the connection sets. ``headers`` have lower-case names; the
    last of equal names wins.
    ``names`` maps them to the names as sent, if the application requests them. ``body`` is the whole body, after
    chunked framing and before decompression.

    Respond with :meth:`respond`, or with :meth:`start`, :meth:`write` … and :meth:`finish`. If the client disconnects
    first, ``on_disconnect`` is called, and everything sent afterwards is dropped.

    ``began`` is the time at which the head had arrived (ns, monotonic), set while requests are traced and for an
    exchange with a ``duration_header``, the name of the header with the time from then to the response (ms).

    The body is released when the exchange ends, or when its client has disconnected and no task works for it.
    """

    __slots__ = (
        "_budget",
        "_owner",
        "began",
        "binary_type",
        "body",
        "client",
        "dialect",
        "duration_header",
        "headers",
        "held",
        "keep_alive",
        "method",
        "names",
        "on_disconnect",
        "path",
        "query",
        "record",
        "refusal",
        "request_id",
        "response_headers",
        "route",
        "started",
        "urgent",
        "worked_for",
    )

    began: int

    def __init__(
        self, owner: ExchangeOwner, method: bytes, path: bytes, headers: dict[bytes, bytes], keep_alive: bool
    ) -> None:
        self._owner: ExchangeOwner | None = owner
        self._budget = owner.budget
        self.method = method
        self.path = path
        self.query = ""
        self.headers = headers
        self.names: dict[bytes, bytes] = {}
        #: Content type prefix for binary responses; the size of the JSON header is appended to it.
        self.binary_type = b""
        self.keep_alive = keep_alive
        self.body: Buffer = b""
        #: Bytes of the body counted in the budget.
        self.held = 0
        #: The handler and its arguments; set and read by the application.
        self.route: Any = None
        #: The form of errors (:class:`conch.frontends.http.dialects.Dialect`); set by the application.
        self.dialect: Any = None
        #: The name of the API key of the request; set by the application.
        self.client = ""
        #: The identifier of the request in its response, in dialects that have one; set by the application.
        self.request_id = b""
        #: Whether the request is served even on a connection above the limit.
        self.urgent = False
        #: The error and status with which the request is refused instead of being handled.
        self.refusal: tuple[ConchError, int] | None = None
        #: Whether a background task works for this exchange; the task ends by calling :meth:`let_go`.
        self.worked_for = False
        self.on_disconnect: Callable[[], None] | None = None
        self.started = False
        self.duration_header = b""
        #: Headers of the response in addition to those of the handler; set by the application.
        self.response_headers: Headers = ()
        #: The access log record of this exchange.
        self.record: AccessRecord | None = None

    def respond(self, status: int, headers: Headers, *body: Buffer) -> None:
        """Send a complete response; large ``body`` parts are not copied."""
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
            owner.writelines([head, *body])
        self._end(owner)

    def start(self, status: int, headers: Headers) -> None:
        """Begin a response of unknown length."""
        if self._owner is not None:
            self.started = True
            if self.record is not None:
                self.record.status = status
            self._owner.transport.write(self._head(status, headers, b"Transfer-Encoding: chunked\r\n\r\n"))

    def write(self, data: bytes) -> None:
        """Send a part of a response begun with :meth:`start`."""
        if self._owner is not None and data:
            if self.record is not None:
                self.record.sent += len(data)
            self._owner.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        """End a response begun with :meth:`start`."""
        owner = self._owner
        if owner is not None:
            owner.transport.write(b"0\r\n\r\n")
            self._end(owner)

    @property
    def unsent(self) -> int:
        """Response bytes that the client has not read yet."""
        return self._owner.transport.get_write_buffer_size() if self._owner else 0

    @property
    def gone(self) -> bool:
        """Whether the exchange has ended or its client has disconnected."""
        return self._owner is None

    def abort(self) -> None:
        """Close the connection without ending the response, so that the client detects the truncation."""
        if self._owner is not None:
            self._owner.transport.abort()

    def disconnect(self) -> None:
        """Handle the client's disconnection; called by the connection."""
        self._owner = None
        if self.record is not None:
            self.record.status = f"{self.record.status} client hung up".lstrip()
            self.record.log()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()
        if not self.worked_for:
            self.let_go()

    def hold(self, size: int) -> None:
        """Count further bytes held for this request. Raises UNAVAILABLE if the budget is exhausted."""
        self.held += size
        if not self._budget.take(size):
            raise self._budget.refusal()

    def let_go(self) -> None:
        """Drop the body and return its bytes to the budget."""
        self.body = b""
        if self.held:
            self._budget.release(self.held)
            self.held = 0

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        lines = [_STATUS_LINE[status]]
        lines += [b"%b: %b\r\n" % header for header in (*headers, *self.response_headers)]
        if self.duration_header:
            lines.append(b"%b: %d\r\n" % (self.duration_header, (monotonic_ns() - self.began) // 1_000_000))
        if not self.keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(framing)
        return b"".join(lines)

    def _end(self, owner: ExchangeOwner) -> None:
        self._owner = None
        if self.record is not None:
            self.record.log()
        self.on_disconnect = None
        self.let_go()
        owner.on_exchange_ended(self)
