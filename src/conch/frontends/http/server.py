"""HTTP connections and listeners of the inference, OpenAI, platform and metrics ports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from ssl import SSLContext
from time import monotonic
from typing import Final

from conch.core.errors import ConchError, invalid
from conch.core.tensors import Buffer
from conch.frontends.admission import AdmissionResult, descriptor_of
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.reader import HttpApplication, RequestReader
from conch.frontends.limits import SLOWEST, SWEEP_SECONDS, ClientLimits
from conch.frontends.listening import listen
from conch.frontends.loop_budget import YieldingLister
from conch.telemetry.metrics import Registry
from conch.telemetry.traffic import Reason

# Runs on the event loop as an ``asyncio.Protocol``; its ``RequestReader`` parses the received bytes. A request reaches
# the application once it has arrived in full, the next one of the same connection after the response, at most one per
# iteration of the event loop. Why not an ASGI server: docs/decisions/0002-http-over-httptools.md.


MAX_PIPELINED: Final = 64
#: A request handled for longer than this (s) starts the event-loop budget of the current iteration.
_LONG: Final = 0.0005
#: The time for which a client may send ignored bytes, so that it can read the reason of its refusal (s).
_LINGER_SECONDS: Final = 2.0


class HttpConnection(asyncio.Protocol):
    """A client's connection. It adds itself to ``connections``, the listener's set of open connections."""

    transport: asyncio.Transport

    def __init__(self, application: HttpApplication, connections: set[HttpConnection], limits: ClientLimits) -> None:
        self._application = application
        self._connections = connections
        self._limits = limits
        self.budget = limits.budget
        self._loop_budget = limits.loop_budget
        self.admission_result = AdmissionResult.SERVED
        self._current: HttpExchange | None = None
        self._waiting: deque[HttpExchange] = deque()
        self._reader = RequestReader(application, self)
        self._closing = False  # after the response that is due
        self._lingering = False
        self._half_closed = False  # the client sends nothing more, but requests are queued
        self._scheduled = False  # whether the next request is scheduled
        self._has_handled = False  # whether a request was handled since the last read
        # Times (s): of the last received bytes or response; since when reading is paused.
        self._active = monotonic()
        self._reading = True
        self._paused_at = 0.0
        # Whether and since when the client leaves data unread, and the bytes unread and read since then.
        self._unread = False
        self._unread_since = 0.0
        self._unread_bytes = 0
        self._read_bytes = 0

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        self._limits.counts.opened("http")
        self.admission_result = self._limits.admission.admit("http", descriptor_of(transport))
        if self.admission_result is AdmissionResult.REFUSED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._limits.counts.ended("http")
        self._closing = True
        self._reader.close()
        self._unread = False
        self._count_unread()
        for exchange in self._waiting:
            exchange.let_go()
        self._waiting.clear()
        if self._current is not None:
            current, self._current = self._current, None
            current.disconnect()

    def pause_writing(self) -> None:
        """Stop reading while the client does not read its responses."""
        self._unread = True
        self._count_unread()
        self._unread_since = monotonic()
        self._read_bytes = 0
        self._control_reading()

    def resume_writing(self) -> None:
        self._unread = False
        self._count_unread()
        self._control_reading()
        self._schedule()

    def data_received(self, data: bytes) -> None:
        if not self._lingering:
            self._active = monotonic()
        self._has_handled = False
        self._reader.feed(data)

    def eof_received(self) -> bool:
        """Treat the end of input as a disconnection, unless requests are queued and none is running.

        TLS connections cannot be half-closed.
        """
        self._half_closed = self._current is None and bool(self._waiting) and self.transport.can_write_eof()
        return self._half_closed

    # Called by the reader

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MAX_PIPELINED

    @property
    def idle(self) -> bool:
        return self._current is None and not self._waiting

    def on_request(self, exchange: HttpExchange) -> None:
        """Handle a request at once or queue it; a client that pipelines requests gets one handled at a time."""
        if (
            self._has_handled
            or self._unread
            or not self.idle
            or exchange is self._reader.starving
            or (self._loop_budget.spent and not exchange.urgent)
        ):
            self._waiting.append(exchange)
            if not self.has_room:
                self._control_reading()
            self._schedule()
        else:
            self._has_handled = True
            self._handle(exchange)

    def on_reader_changed(self) -> None:
        self._control_reading()
        self._schedule()

    # Called by exchanges and by the listener

    def write(self, data: bytes) -> None:
        """Send a part of a response."""
        unread = self._unread
        self.transport.write(data)
        if unread:
            self._count_unread(len(data))

    def writelines(self, parts: list[Buffer]) -> None:
        """Send the last parts of a response without copying them."""
        if isinstance(self.transport, asyncio.Transport):  # asyncio's own transport may not pause after writelines
            self.transport.write(b"".join(parts))
        else:
            self.transport.writelines(parts)

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        """Continue with the next request, or close if the response requires it."""
        self._current = None
        self._active = monotonic()
        if not exchange.keep_alive or self._closing:
            self._close()
        elif self._waiting:
            self._schedule()

    def shut_down(self) -> None:
        """Close now if idle, otherwise after the response that is due."""
        self._closing = True
        if self.idle:
            self.transport.close()
        elif self._current is not None and not self._current.started:
            self._current.keep_alive = False

    def sweep(self, now: float) -> None:
        """End the connection if its client has exceeded a time limit."""
        times, reader = self._limits.times, self._reader
        if self.admission_result is not AdmissionResult.SERVED and now - self._active > _LINGER_SECONDS:
            self.transport.abort()
            return
        if self._lingering:
            if now - self._active > _LINGER_SECONDS:
                self.transport.abort()
        elif self._unread:
            self._count_unread()
            if now - self._unread_since > times.unread + self._read_bytes / SLOWEST:
                self._end("unread")
        elif reader.begun:
            seconds = now - reader.since - reader.kept_waiting
            if not self._reading:
                return
            if reader.in_head and seconds > times.head:
                self._end("head", "the head of the request did not arrive within --head-timeout-secs")
            elif not reader.in_head and seconds > times.body + reader.size / SLOWEST:
                self._end("body", "the body of the request did not arrive within --body-timeout-secs")
        elif self.idle and now - self._active > (times.idle if reader.since else min(times.head, times.idle)):
            self._end("idle" if reader.since else "head")

    # Requests, one at a time

    def _handle(self, exchange: HttpExchange) -> None:
        self._current = exchange
        began = monotonic()
        if exchange.refusal is not None:
            self._application.refuse(exchange, *exchange.refusal)
        else:
            self._application.handle(exchange)
        if monotonic() - began > _LONG:
            self._loop_budget.over()  # starts counting the time of this iteration

    def _schedule(self) -> None:
        """Handle the next request in a later iteration of the event loop, after other connections."""
        if not self._scheduled and self._waiting and self._current is None:
            self._scheduled = True
            self._loop_budget.later(self._next)

    def _next(self) -> None:
        self._scheduled = False
        if not self._waiting or self._current is not None or self._unread or self.transport.is_closing():
            return
        if self._waiting[0] is not self._reader.starving:
            exchange = self._waiting.popleft()
            self._current = exchange  # requests parsed from now on queue behind it
            if not self._reading:
                self._reader.go_on()
            self._handle(exchange)
            if self._half_closed and (self._current is not None or not self._waiting):
                self.transport.close()

    def _control_reading(self) -> None:
        reading = self._lingering or (not self._unread and self.has_room and not self._reader.full)
        if reading == self._reading or self.transport.is_closing():
            return
        self._reading = reading
        if reading:
            self._reader.kept_waiting += monotonic() - self._paused_at
            self.transport.resume_reading()
        else:
            self._paused_at = monotonic()
            self.transport.pause_reading()

    # Unread data, and the end

    def _count_unread(self, written: int = 0) -> None:
        """Count unread response bytes in the budget; ``written`` is the number of bytes just added."""
        unread = self.transport.get_write_buffer_size() if self._unread else 0
        change = unread - self._unread_bytes
        self._unread_bytes = unread
        self._read_bytes += written - change
        if change > 0:
            self.budget.take(change)
        elif change:
            self.budget.release(-change)

    def _end(self, reason: Reason, message: str = "") -> None:
        """End the connection for a time limit; after the responses that are due if there is a ``message``."""
        self._limits.counts.closed_for("http", reason)
        if message:
            self._reader.refuse(408, invalid(message))
        else:
            self.transport.abort()

    def _close(self) -> None:
        """Close when everything is sent, reading and ignoring the rest of a refused request."""
        ends_apart = self.transport.can_write_eof()  # not with TLS
        if self._closing or not self._reader.broken or self.transport.is_closing() or not ends_apart:
            self.transport.close()
        else:
            self._lingering = True
            self.transport.write_eof()
            self._control_reading()


class HttpListener:
    """A port and its connections, subject to ``limits``.

    With ``reuse_port``, other processes may listen on the same port; with ``ssl``, connections are encrypted.
    """

    def __init__(
        self,
        application: HttpApplication,
        limits: ClientLimits,
        *,
        reuse_port: bool = False,
        ssl: SSLContext | None = None,
    ) -> None:
        self._application = application
        self._limits = limits
        self._reuse_port = reuse_port
        self._ssl = ssl
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> Collection[HttpConnection]:
        """The open connections."""
        return self._connections

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen on ``host:port`` (port 0: any free port); returns the address. Raises PortTakenError."""
        self._server, address = await listen(
            lambda: HttpConnection(self._application, self._connections, self._limits),
            host,
            port,
            reuse_port=self._reuse_port,
            tls=self._ssl,
            handshake_seconds=self._limits.times.head,
        )
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_again)
        return address

    def refuse_new(self) -> None:
        """Stop accepting connections."""
        if self._server is not None:
            self._server.close()

    async def stop(self, seconds: float) -> None:
        """Stop listening; wait at most ``seconds`` for responses that are due, then close the remaining connections."""
        self.refuse_new()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.shut_down()
        deadline = monotonic() + seconds
        while self._connections and monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connections whose clients exceed a time limit at ``now`` (s, monotonic)."""
        for connection in list(self._connections):
            connection.sweep(now)

    def _sweep_again(self) -> None:
        """Check all connections; one timer serves all of them."""
        self.sweep(monotonic())
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_again)


class MetricsPage:
    """The application of the metrics port: ``GET /metrics`` only."""

    keeps_names = False
    _TEXT = (b"Content-Type", b"text/plain; charset=utf-8")

    def __init__(self, registry: Registry, lister: YieldingLister) -> None:
        self._registry = registry
        self._lister = lister

    def open(self, exchange: HttpExchange) -> int:
        if exchange.method != b"GET":
            exchange.refusal = (ConchError("Method Not Allowed"), 405)
        exchange.urgent = True
        return 0

    def handle(self, exchange: HttpExchange) -> None:
        if exchange.path == b"/metrics":
            start_work(exchange, self._respond_with_page(exchange))
        else:
            exchange.respond(200, [self._TEXT])

    async def _respond_with_page(self, exchange: HttpExchange) -> None:
        lines = await self._lister.all(self._registry.lines())
        exchange.respond(200, [self._TEXT], "".join(lines).encode())

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        refuse(exchange, error, status)

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        return "the metrics port takes no request bodies"
