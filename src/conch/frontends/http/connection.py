"""The server's side of an HTTP/1.1 connection: parsing by httptools, keep-alive, pipelining, limits.

Runs on the event loop as an ``asyncio.Protocol``.  A request is handed to the application once it has arrived in full,
the next one of the same connection after the response.  Everything that a client can make the server keep is bounded:
header bytes, body bytes, chunks, pipelined requests, time.  Why not an ASGI server:
docs/decisions/0002-http-over-httptools.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

import httptools

from conch.frontends.http.exchange import JSON, HttpExchange

#: Bytes that may be read while a head is not complete; the read in which it begins counts as a whole.
MAX_HEAD_BYTES = 512 * 1024
_HEAD_TOO_LARGE = f"request header exceeds the maximum of {MAX_HEAD_BYTES} bytes"
MAX_CHUNKS = 65536
MAX_PIPELINED = 64
#: The largest body of all (bytes): more than 2 GiB does not fit into a gRPC message either.
MAX_BODY_BYTES = 2**31 - 1


class HttpApplication(Protocol):
    """Serves the requests of connections; called on the event loop."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer an exchange whose request has arrived in full, now or later."""

    def body_limit(self, exchange: HttpExchange) -> int:
        """The largest body (bytes) to read for a request of which only the head has arrived."""

    def too_large(self, size: int, limit: int) -> str:
        """The error message for a body of at least ``size`` bytes."""

    def error_body(self, message: str) -> bytes:
        """The JSON body of the response to a request that cannot be parsed, or is too large."""


class HttpConnection(asyncio.Protocol):
    """One client's connection.  It adds itself to ``connections``, the listener's set of the open ones."""

    transport: asyncio.Transport

    def __init__(self, application: HttpApplication, connections: set[HttpConnection]) -> None:
        self._application = application
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._current: HttpExchange | None = None
        self._waiting: deque[HttpExchange] = deque()
        self._closing = False
        self._unread = False  # whether the client does not read its responses
        self._reading = True
        self.active = monotonic()
        self._in_head = True
        self._head_bytes = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_size = 0
        self._chunks = 0

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        self._waiting.clear()
        if self._current is not None:
            current, self._current = self._current, None
            current.disconnect()

    def pause_writing(self) -> None:
        """The client does not read: read nothing from it either until it does."""
        self._unread = True
        self._control_reading()

    def resume_writing(self) -> None:
        self._unread = False
        self._control_reading()
        self._next()

    def data_received(self, data: bytes) -> None:
        self.active = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refused):
                self._refuse(cause.status, cause.message)
            else:
                self._refuse(400, "invalid HTTP request")
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, _HEAD_TOO_LARGE)

    # Called by the parser

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = {}
        self._body = []
        self._body_size = 0
        self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers[name.lower()] = value
            return
        # A trailer: none has a meaning here, and they are no way around the bounds.
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused(431, _HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        path = self._target.partition(b"?")[0]
        if not path.startswith(b"/"):
            try:
                path = httptools.parse_url(path).path or b"/"
            except httptools.HttpParserInvalidURLError:
                raise _Refused(400, "invalid request target") from None
        self._exchange = HttpExchange(
            self, self._parser.get_method(), path, self._headers, self._parser.should_keep_alive()
        )
        self._body_limit = self._application.body_limit(self._exchange)
        length = self._headers.get(b"content-length")
        if length is not None and int(length) > self._body_limit:
            raise _Refused(400, self._application.too_large(int(length), self._body_limit))
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise _Refused(
                400,
                f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
                "Send fewer or larger HTTP chunks.",
            )

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > self._body_limit:
            raise _Refused(400, self._application.too_large(self._body_size, self._body_limit))
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        if self._parser.should_upgrade():
            return
        exchange = self._exchange
        exchange.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if self._current is None and not self._waiting and not self._unread:
            self._current = exchange
            self._application.handle(exchange)
        else:
            self._waiting.append(exchange)
            self._control_reading()

    # Called by exchanges and by the listener

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        """Go on with the next request, or close if the response said so."""
        self._current = None
        self.active = monotonic()
        if not exchange.keep_alive or self._closing:
            self.transport.close()
        elif self._waiting:
            # Not from here: exchanges that are answered at once would nest.
            asyncio.get_running_loop().call_soon(self._next)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self._current is None and not self._waiting

    def shut_down(self) -> None:
        """Close now if idle, otherwise after the response that is due."""
        self._closing = True
        if self.idle:
            self.transport.close()
        elif self._current is not None and not self._current.started:
            self._current.keep_alive = False

    def _next(self) -> None:
        if self._waiting and self._current is None and not self._unread and not self.transport.is_closing():
            self._current = self._waiting.popleft()
            self._control_reading()
            self._application.handle(self._current)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Ignore the offer of another protocol (RFC 9110, 7.8).

        The parser ends such a request with its head; a new parser gets the head without the offer, and ``rest``.
        """
        exchange = self._exchange
        if exchange.method == b"CONNECT":
            self._refuse(400, "this server is no proxy")
            return
        head = [b"%b %b HTTP/1.1" % (exchange.method, self._target)]
        head += [b"%b: %b" % header for header in self._headers.items() if header[0] not in (b"upgrade", b"connection")]
        if b"close" in self._headers.get(b"connection", b"").lower():
            head.append(b"connection: close")
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def _control_reading(self) -> None:
        wanted = not self._unread and len(self._waiting) < MAX_PIPELINED
        if wanted == self._reading or self.transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that cannot be read, and close; responses that are still due are given up."""
        if self.transport.is_closing():
            return
        if self._current is None:
            refused = HttpExchange(self, b"", b"", {}, keep_alive=False)
            refused.respond(status, [JSON], self._application.error_body(message))
        else:
            self.transport.close()


class _Refused(Exception):
    """Raised by the parser's callbacks to stop reading this connection."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
