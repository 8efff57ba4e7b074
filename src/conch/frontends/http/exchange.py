"""One HTTP request and its response, as handlers see them.

Made by a connection (``connection.py``), which sends the response; lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final, Protocol

from conch.errors import ConchError
from conch.frontends.access_log import AccessRecord
from conch.frontends.budget import ByteBudget
from conch.tensors import Buffer

#: A header that many responses have.
JSON: Final = (b"Content-Type", b"application/json")
Headers = Iterable[tuple[bytes, bytes]]

_STATUS_LINE = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
#: A body of fewer bytes goes out in one buffer with its head; for a larger one joining costs more than it saves.
_JOIN_BELOW = 32 * 1024


class ExchangeOwner(Protocol):
    """The connection of an exchange; ``budget`` is where the bytes of bodies are counted."""

    transport: asyncio.Transport
    budget: ByteBudget

    def write(self, data: bytes) -> None:
        """Send a part of a response of which more parts follow."""

    def writelines(self, parts: list[Buffer]) -> None:
        """Send a large response, in parts that are not copied."""

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        """The response has been written."""


class HttpExchange:
    """A request, and the means to answer it once it has arrived in full.

    ``path`` is the raw target without its query, ``headers`` have lower-case names (the last of
    equal ones wins; ``names`` has them as they were sent, where the application asks for that),
    ``body`` is the whole body, after chunked framing and before decompression.
    Answer with :meth:`respond`, or with :meth:`start`, :meth:`write` … and :meth:`finish`.  If the client hangs up
    first, ``on_disconnect`` is called, and what is sent after that is dropped.

    ``began`` is when its head had arrived (ns, monotonic), set only while requests are traced.

    The body is gone once the exchange has been answered, or its client has hung up and nobody works for it.
    """

    __slots__ = (
        "_budget",
        "_owner",
        "began",
        "binary_type",
        "body",
        "headers",
        "held",
        "keep_alive",
        "method",
        "names",
        "on_disconnect",
        "path",
        "record",
        "refusal",
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
        self.headers = headers
        self.names: dict[bytes, bytes] = {}
        #: The content type for binary tensors whose client wants the size of the JSON before them at its end.
        self.binary_type = b""
        self.keep_alive = keep_alive
        self.body: Buffer = b""
        #: The bytes of the body that are counted in the budget.
        self.held = 0
        #: What the application found out about the head, for itself.
        self.route: Any = None
        #: Whether it is answered even to those for whom the server has no other place.
        self.urgent = False
        #: With what the request is refused instead of being handled, and the status.
        self.refusal: tuple[ConchError, int] | None = None
        #: Whether a task works for this exchange, which ends by calling :meth:`let_go`.
        self.worked_for = False
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
        """Send a part of a response that :meth:`start` began."""
        if self._owner is not None and data:
            if self.record is not None:
                self.record.sent += len(data)
            self._owner.write(b"%x\r\n%b\r\n" % (len(data), data))

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
        if not self.worked_for:
            self.let_go()

    def hold(self, size: int) -> None:
        """Count further bytes that are held for this request.  Raises UNAVAILABLE if the server holds too many."""
        self.held += size
        if not self._budget.take(size):
            raise self._budget.refusal()

    def let_go(self) -> None:
        """Forget the body, and give its bytes back to the budget."""
        self.body = b""
        if self.held:
            self._budget.release(self.held)
            self.held = 0

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
        self.let_go()
        owner.on_exchange_ended(self)
