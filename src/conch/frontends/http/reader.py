"""Parses an HTTP/1.1 connection into requests with httptools, and limits how much is read.

Each connection has a ``RequestReader`` on the event loop. From the head, the application selects the handler and the
maximum body size. A body counts in the budget shared by all connections while it arrives; the reader waits while the
budget is exhausted.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Final, Protocol

import httptools

from conch.core.errors import ConchError, invalid
from conch.frontends.admission import Admission, AdmissionResult
from conch.frontends.budget import SMALL, BudgetWait
from conch.frontends.http.exchange import ExchangeOwner, HttpExchange

#: Maximum bytes read while a head is incomplete; the piece in which it begins counts in full.
MAX_HEAD_BYTES = 512 * 1024
_HEAD_TOO_LARGE = f"request header exceeds the maximum of {MAX_HEAD_BYTES} bytes"
MAX_CHUNKS = 65536
_VERSIONS: Final = ("1.1", "1.0")
#: The response to a request refused for its head is sent after its body if the body is at most this size (bytes), so
#: that the connection can be reused; otherwise at once, and the connection closes.
MAX_IGNORED_BODY: Final = 64 << 10
#: Bytes parsed at a time where they may hold many requests.
_PIECE: Final = 4 << 10
_NOTHING: Final = memoryview(b"")


class HttpApplication(Protocol):
    """Serves the requests of connections, on the event loop.

    ``keeps_names`` requests the header names as sent.
    """

    keeps_names: bool

    def open(self, exchange: HttpExchange) -> int:
        """Select the handler of a request from its head; returns the maximum body size.

        Sets ``exchange.refusal`` if the request is refused, and ``exchange.urgent``.
        """

    def handle(self, exchange: HttpExchange) -> None:
        """Respond to an exchange whose request has arrived in full, immediately or later."""

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        """Respond with an error; ``exchange`` has no path if its head cannot be parsed."""

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        """Return the error message for a body of at least ``size`` bytes."""


class RequestReceiver(ExchangeOwner, Protocol):
    """The connection of a reader; ``admission_result`` determines which requests are allowed."""

    admission_result: AdmissionResult

    @property
    def has_room(self) -> bool:
        """Whether further requests may be parsed; False while too many are queued."""

    @property
    def idle(self) -> bool:
        """Whether no response is due."""

    def on_request(self, exchange: HttpExchange) -> None:
        """Handle a received request, or one to refuse; called for no request after one that closes the connection."""

    def on_reader_changed(self) -> None:
        """Check :attr:`RequestReader.full`; called when it may have changed."""


class RequestReader:
    """Parses the bytes that a client sends.

    ``begun`` is true when a request has arrived in part, ``in_head`` until its body begins. ``since`` is when it began
    (s, monotonic), ``size`` the bytes of its body so far. The connection adds the time during which it did not read to
    ``kept_waiting`` (s). ``starving`` is the exchange that waits for the budget. ``broken`` is true when nothing more
    is read.
    """

    def __init__(self, application: HttpApplication, receiver: RequestReceiver) -> None:
        self._application = application
        self._receiver: RequestReceiver | None = receiver
        self._budget = receiver.budget
        self._parser: Any = httptools.HttpRequestParser(self)
        self._rest = _NOTHING
        self._exchange: HttpExchange | None = None
        self._wait: BudgetWait | None = None
        self._head_bytes = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] | None = {} if application.keeps_names else None
        self._body: list[bytes] = []
        self._length = 0
        self._limit = 0
        self._chunks = 0
        self.starving: HttpExchange | None = None
        self.broken = False
        self.begun = False
        self.in_head = True
        self.since = 0.0
        self.kept_waiting = 0.0
        self.size = 0

    # Called by the connection

    @property
    def full(self) -> bool:
        """Whether reading must pause."""
        return self.broken or self._wait is not None or len(self._rest) > 0

    def feed(self, data: bytes) -> None:
        """Parse received bytes, or keep them for ``go_on`` while the connection has too many requests."""
        if len(data) <= _PIECE and not self.full:
            self._feed(data)
        elif not self.broken:
            self._rest = memoryview(bytes(self._rest) + data if self._rest else data)
            self.go_on()

    def go_on(self) -> None:
        """Parse the remaining bytes while the connection accepts requests."""
        receiver = self._receiver
        while self._rest and self._wait is None and receiver is not None and receiver.has_room:
            # Body bytes cost almost nothing to parse.
            size = _PIECE if self.in_head else max(_PIECE, self._length - self.size)
            piece, self._rest = self._rest[:size], self._rest[size:]
            self._feed(piece)
        if receiver is not None:
            receiver.on_reader_changed()

    def refuse(self, status: int, error: ConchError) -> None:
        """Discard the incoming request; its refusal is the last response on the connection."""
        if self.broken or self._receiver is None:
            return
        exchange = self._exchange or HttpExchange(self._receiver, b"", b"", {}, keep_alive=False)
        exchange.keep_alive = False
        exchange.refusal = (error, status)
        self._give_up()
        self._receiver.on_request(exchange)

    def close(self) -> None:
        """Release everything, including the connection; called when the connection is lost."""
        self._give_up()
        # The parser refers to the reader: breaking the cycle frees both at once, without the garbage collector.
        self._receiver = self._parser = None

    def _give_up(self) -> None:
        if self._wait is not None:
            self._budget.cancel(self._wait)
            self._wait = self.starving = None
        if self._exchange is not None:
            self._exchange.let_go()
            self._exchange = None
        self.broken = True
        self.begun = False
        self._body = []
        self._rest = _NOTHING

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refused):
                self.refuse(cause.status, cause.error)
            else:
                self.refuse(400, invalid("invalid HTTP request"))
        else:
            if self.in_head:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.refuse(431, invalid(_HEAD_TOO_LARGE))

    def _decline_upgrade(self, rest: bytes | memoryview) -> None:
        """Ignore an offer to upgrade to another protocol (RFC 9110, 7.8).

        The parser ends such a request after its head; a new parser gets the head without the offer, and ``rest``.
        """
        exchange = self._exchange
        assert exchange is not None
        if exchange.method == b"CONNECT":
            self.refuse(400, invalid("this server is not a proxy"))
            return
        head = [b"%b %b HTTP/1.1" % (exchange.method, self._target)]
        head += [b"%b: %b" % header for header in self._headers.items() if header[0] not in (b"upgrade", b"connection")]
        if b"close" in self._headers.get(b"connection", b"").lower():
            head.append(b"connection: close")
        self._parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*head, b"", rest]))

    # Called by the parser

    def on_message_begin(self) -> None:
        self.begun = True
        self.since = monotonic()
        self.kept_waiting = 0.0
        self.size = 0
        self._target = b""
        self._headers = {}
        self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:
            sent, name = name, name.lower()
            if self._names is not None:
                self._names[name] = sent
            if name == b"host" and name in self._headers:
                raise _Refused(400, "more than one Host")  # a proxy may have used the other one
            self._headers[name] = value
            return
        # Trailers are ignored, but count towards the limit of the head.
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused(431, _HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self._head_bytes = 0
        path, _, query = self._target.partition(b"?")
        if not path.startswith(b"/"):
            try:
                path = httptools.parse_url(path).path or b"/"
            except httptools.HttpParserInvalidURLError:
                raise _Refused(400, "invalid request target") from None
        receiver, headers = self._receiver, self._headers
        assert receiver is not None
        keep_alive = self._parser.should_keep_alive()
        # The parser also accepts HTTP 0.9 and 2.0, and closes the connection after them.
        if not keep_alive and (version := self._parser.get_http_version()) not in _VERSIONS:
            raise _Refused(505, f"HTTP {version} is not supported: use HTTP/1.1")
        self._exchange = exchange = HttpExchange(receiver, self._parser.get_method(), path, headers, keep_alive)
        exchange.query = query.decode("latin-1")
        if self._names is not None:
            exchange.names, self._names = self._names, {}
        self._limit = limit = self._application.open(exchange)
        if receiver.admission_result is not AdmissionResult.SERVED:
            exchange.keep_alive = False
            if not exchange.urgent:
                exchange.refusal = (Admission.refusal(), 503)
        coding = headers.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise _Refused(501, "the only supported transfer coding is chunked")
        length = headers.get(b"content-length")
        self._length = size = int(length) if length is not None else 0
        expects = b"expect" in headers and headers[b"expect"].lower() == b"100-continue"
        if exchange.refusal is not None:
            self._limit = MAX_IGNORED_BODY
            if size > MAX_IGNORED_BODY or expects:
                raise _Refused(exchange.refusal[1], exchange.refusal[0])
        elif size > limit:
            raise _Refused(400, self._application.too_large(exchange, size, limit))
        elif size > self._budget.size:
            raise _Refused(400, f"a body of {size} bytes is more than --max-bytes-in-flight, {self._budget.size}")
        elif expects and receiver.idle:
            receiver.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise _Refused(
                400,
                f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
                "Send fewer or larger HTTP chunks.",
            )

    def on_body(self, body: bytes) -> None:
        exchange, size = self._exchange, len(body)
        assert exchange is not None
        self.size += size
        if self.size > self._limit:
            if exchange.refusal is not None:
                raise _Refused(exchange.refusal[1], exchange.refusal[0])
            raise _Refused(400, self._application.too_large(exchange, self.size, self._limit))
        if exchange.refusal is not None:
            return
        self._body.append(body)
        exchange.held += size
        budget = self._budget
        if not budget.take(size) and self._wait is None and (self.size > SMALL or budget.overdrawn):
            self.starving = exchange
            self._wait = budget.wait(self.since, self._on_room, self._on_no_room)
            assert self._receiver is not None
            self._receiver.on_reader_changed()

    def on_message_complete(self) -> None:
        exchange = self._exchange
        self.in_head = True
        if self._parser.should_upgrade():
            return
        assert exchange is not None and self._receiver is not None
        self.begun = False
        self._exchange = None
        self._headers = {}
        if self._body:
            exchange.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
        self._receiver.on_request(exchange)

    # Called by the budget

    def _on_room(self) -> None:
        self._wait = self.starving = None
        self.go_on()

    def _on_no_room(self, error: ConchError) -> None:
        """Refuse the request that waited too long for budget, even if it has arrived in full."""
        exchange, self.starving, self._wait = self.starving, None, None
        assert exchange is not None
        if exchange is self._exchange:
            self.refuse(503, error)
        else:
            exchange.let_go()
            exchange.refusal = (error, 503)
            self.go_on()


class _Refused(Exception):
    """Raised by the parser's callbacks to stop reading."""

    def __init__(self, status: int, error: ConchError | str) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error if isinstance(error, ConchError) else invalid(error)
