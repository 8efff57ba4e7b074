"""The server side of an HTTP/2 connection, between the transport, the frames and the streams.

The application creates one ``Http2Connection`` for each TCP connection; runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal, NamedTuple, Protocol, cast

from conch.http2 import frames
from conch.http2.frame_reader import Http2FrameReader
from conch.http2.frame_writer import MAX_SEND_FRAME_SIZE, Http2FrameWriter
from conch.http2.frames import ConnectionFault, Http2ErrorCode
from conch.http2.headers import MAX_HEADER_LIST
from conch.http2.limits import CONNECTION_WINDOW, MAX_STREAMS, RECEIVE_FRAME_SIZE, STREAM_WINDOW, Http2Limits
from conch.http2.session import TOO_MANY_PINGS, Http2Session
from conch.http2.streams import Http2Application, Http2Stream

#: A limit of the application, or a flood guard's, because of which a connection or stream ended.
ExceededLimit = Literal["head", "body", "unread", "idle", "pings", "flood"]

# Each connection has a ``StallWatch``, which the application calls at regular intervals.


class _Stall(NamedTuple):
    """The time (s) since which the client must make progress, and its number of bytes or events at that time."""

    since: float
    moved: int


_BODY: Final = "the message did not arrive within --body-timeout-secs"
_UNREAD: Final = "the response was not read within --unread-timeout-secs"


class StallWatch:
    """Checks a connection against the time limits; all times are monotonic seconds."""

    def __init__(self, limits: Http2Limits, on_exceeded: Callable[[ExceededLimit], None], began: float) -> None:
        self._limits = limits
        self._on_exceeded = on_exceeded
        self._began = began
        self._partial: _Stall | None = None
        self._blocked: _Stall | None = None
        self._idle = _Stall(began, 0)
        self._draining_since = 0.0
        #: By stream, and by the position of the message in its body.
        self._owed: dict[tuple[int, int], _Stall] = {}
        self._unread: dict[int, _Stall] = {}

    def check(self, connection: Http2Connection, now: float) -> None:
        """End the connection, or its streams, if they have exceeded a time limit at ``now``."""
        if connection.session.closed:
            return
        if self._handshake_is_late(connection, now):
            self._end(connection, "head", "the head of a request did not arrive within --head-timeout-secs")
        elif self._is_blocked(connection.writer, now):
            self._end(connection, "unread", _UNREAD)
        elif connection.session.streams:
            self._idle = _Stall(now, connection.session.last_stream)
            self._check_streams(connection.session, now)
        else:
            self._owed.clear()
            self._unread.clear()
            self._check_idle(connection, now)

    def _end(self, connection: Http2Connection, limit: ExceededLimit, message: str) -> None:
        self._on_exceeded(limit)
        connection.fail(Http2ErrorCode.ENHANCE_YOUR_CALM, message)

    def _handshake_is_late(self, connection: Http2Connection, now: float) -> bool:
        """Whether the client's SETTINGS, or the rest of a frame or header block, are late."""
        if not connection.session.greeted:
            return now - self._began > self._limits.head
        if not connection.reader.partial and not connection.session.in_header_block:
            self._partial = None
            return False
        frames = connection.session.blocks if connection.session.in_header_block else connection.reader.frames
        if self._partial is None or self._partial.moved != frames:
            self._partial = _Stall(now, frames)
        return now - self._partial.since > self._limits.head

    def _is_blocked(self, writer: Http2FrameWriter, now: float) -> bool:
        """Whether the transport has accepted nothing for too long, because the client does not read."""
        if not writer.paused:
            self._blocked = None
            return False
        if self._blocked is None or self._blocked.moved != writer.resumed:
            self._blocked = _Stall(now, writer.resumed)
        return now - self._blocked.since > self._limits.unread

    def _check_idle(self, connection: Http2Connection, now: float) -> None:
        """Drain a connection that has had no call for too long; close it if the client does not."""
        if self._idle.moved != connection.session.last_stream:
            self._idle = _Stall(now, connection.session.last_stream)
        elif self._draining_since:
            if now - self._draining_since > self._limits.head:
                connection.fail(Http2ErrorCode.NO_ERROR, "max_idle")
        elif now - self._idle.since > self._limits.idle:
            self._draining_since = now
            self._on_exceeded("idle")
            connection.drain()

    def _check_streams(self, session: Http2Session, now: float) -> None:
        owed: dict[tuple[int, int], _Stall] = {}
        unread: dict[int, _Stall] = {}
        for stream in list(session.streams.values()):
            awaited = stream.handler.awaited
            if awaited is not None:
                stall = self._owed.get((stream.id, awaited)) or _Stall(now, stream.received)
                owed[stream.id, awaited] = stall
                if now - stall.since > self._limits.body + (stream.received - stall.moved) / self._limits.min_rate:
                    self._stop(stream, "body", _BODY)
            if stream.queued:
                stall = self._unread.get(stream.id) or _Stall(now, stream.sent)
                unread[stream.id] = stall
                if now - stall.since > self._limits.unread + (stream.sent - stall.moved) / self._limits.min_rate:
                    self._stop(stream, "unread", _UNREAD)
        self._owed = owed
        self._unread = unread

    def _stop(self, stream: Http2Stream, limit: ExceededLimit, message: str) -> None:
        self._on_exceeded(limit)
        stream.handler.on_stalled(message)


LOGGER: Final = logging.getLogger("conch")

#: Reads up to this size (bytes), a few requests at most, are handled at once.
_SMALL_READ: Final = 1024
_KEEPALIVE_PING: Final = b"conch-ka"
#: The first frames from the server.
_GREETING: Final = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        frames.MAX_FRAME_SIZE: RECEIVE_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST,
    }
) + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)


class ConnectionObserver(Protocol):
    """Tracks the open connections; called on the event loop."""

    def on_connection_made(self, connection: Http2Connection) -> None:
        """Add a connection that can be used; TLS, if any, is established."""

    def on_connection_lost(self, connection: Http2Connection) -> None:
        """Remove a connection that has ended; called once for each one that was made."""

    def on_limit_exceeded(self, limit: ExceededLimit) -> None:
        """Count a connection or stream that ends because of a limit."""


class Http2Connection(asyncio.Protocol):
    """An HTTP/2 connection; ``active`` is set when data arrives.

    Input is handled within ``loop_budget``; the connection stops reading until the rest has been handled.
    """

    reader: Http2FrameReader
    session: Http2Session
    writer: Http2FrameWriter
    transport: asyncio.Transport

    def __init__(
        self,
        application: Http2Application,
        loop: asyncio.AbstractEventLoop,
        observer: ConnectionObserver,
        limits: Http2Limits,
    ) -> None:
        self.active = True
        self._application = application
        self._loop = loop
        self._observer = observer
        self._limits = limits
        self._loop_budget = limits.loop_budget
        self._put_off = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, but not the base class.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=MAX_SEND_FRAME_SIZE)
        self.writer = Http2FrameWriter(self._loop, self.transport)
        self.session = Http2Session(self, self._application, self._loop, self.writer, self._limits)
        self._stalls = StallWatch(self._limits, self._observer.on_limit_exceeded, monotonic())
        self.reader = Http2FrameReader(self.session, self._loop_budget)
        self.writer.write(_GREETING)
        self._observer.on_connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        session = self.session
        session.end()
        self._observer.on_connection_lost(self)
        # The session refers to the connection: breaking the cycle frees both at once, without the garbage collector.
        del self.session, self.reader

    def pause_writing(self) -> None:
        self.writer.paused = True

    def resume_writing(self) -> None:
        self.writer.resume()

    def data_received(self, data: bytes) -> None:
        if self.session.closed:
            return
        self.active = True
        if self._put_off or (len(data) > _SMALL_READ and self._loop_budget.over()):
            self.reader.put_off(data)
            self._continue_later()
        else:
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        """Pass data to the reader, and handle the remaining data or an error."""
        self.writer.cork()
        try:
            if not self.reader.feed(data):
                self._continue_later()
        except ConnectionFault as fault:
            if fault.code is Http2ErrorCode.ENHANCE_YOUR_CALM:
                self._observer.on_limit_exceeded("pings" if str(fault) == TOO_MANY_PINGS else "flood")
            self.fail(fault.code, str(fault))
        except Exception:
            LOGGER.exception("HTTP/2 connection failed")
            self.fail(Http2ErrorCode.INTERNAL_ERROR, "")
        self.writer.flush()

    def _continue_later(self) -> None:
        if not self._put_off and not self.transport.is_closing():
            self._put_off = True
            self.transport.pause_reading()
            self._loop_budget.later(self._continue)

    def _continue(self) -> None:
        """Handle more of the queued input in a later iteration of the event loop."""
        self._put_off = False
        if self.transport.is_closing():
            return
        self._handle(b"")
        if not self._put_off and not self.transport.is_closing():
            self.transport.resume_reading()

    # Called by the application

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        """End the connection at once with a GOAWAY; every stream is reset."""
        if self.session.closed:
            return
        self.session.end()
        if self.writer.paused:
            self.transport.abort()
            return
        self.writer.write(frames.goaway(self.session.last_stream, code, message))
        self.writer.flush()
        self.transport.close()

    def sweep(self, now: float) -> None:
        """End the connection, or its streams, if they have exceeded a time limit at ``now`` (s, monotonic)."""
        self._stalls.check(self, now)

    def drain(self) -> None:
        """Accept no new streams, and close when the open ones have ended."""
        self.session.drain()

    def ping(self) -> None:
        """Send a PING, whose acknowledgement sets ``active``."""
        self.writer.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    # Called by the session

    def on_drained(self) -> None:
        self.writer.flush()
        self.transport.close()
