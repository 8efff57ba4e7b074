"""The server's side of an HTTP/2 connection: between the transport, the frames and the streams.

One ``Http2Connection`` for each TCP connection, made by :mod:`conch.frontends.grpc.server`; runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Final, Protocol, cast

from conch.frontends.admission import descriptor_of
from conch.frontends.grpc.http2 import frames
from conch.frontends.grpc.http2.application import Http2Application
from conch.frontends.grpc.http2.frame_reader import Http2FrameReader
from conch.frontends.grpc.http2.frame_writer import MAX_SEND_FRAME_SIZE, Http2FrameWriter
from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode
from conch.frontends.grpc.http2.headers import MAX_HEADER_LIST
from conch.frontends.grpc.http2.limits import CONNECTION_WINDOW, MAX_STREAMS, RECEIVE_FRAME_SIZE, STREAM_WINDOW
from conch.frontends.grpc.http2.pings import PingLimits
from conch.frontends.grpc.http2.session import TOO_MANY_PINGS, Http2Session
from conch.frontends.grpc.http2.stalls import StallWatch
from conch.frontends.limits import ClientLimits
from conch.frontends.turns import LoopTurns

LOGGER: Final = logging.getLogger("conch")

#: Reads of no more than this (bytes), a few requests at most, are handled at once.
_SMALL_READ: Final = 1024
_KEEPALIVE_PING: Final = b"conch-ka"
#: What the server says first.
_GREETING: Final = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        frames.MAX_FRAME_SIZE: RECEIVE_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST,
    }
) + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)


class ConnectionObserver(Protocol):
    """Keeps track of the connections that are open; called on the event loop."""

    def on_connection_made(self, connection: Http2Connection) -> None:
        """The connection can be used; TLS, if any, is established."""

    def on_connection_lost(self, connection: Http2Connection) -> None:
        """The connection has ended; called once for each that was made."""


class Http2Connection(asyncio.Protocol):
    """``descriptor`` is that of its socket; ``active`` is set when something arrives.

    What arrives is handled as far as ``turns`` allow; the connection reads no more until the rest has been handled.
    """

    reader: Http2FrameReader
    session: Http2Session
    writer: Http2FrameWriter
    _transport: asyncio.Transport

    def __init__(
        self,
        application: Http2Application,
        loop: asyncio.AbstractEventLoop,
        observer: ConnectionObserver,
        turns: LoopTurns,
        limits: ClientLimits,
        pings: PingLimits,
    ) -> None:
        self.active = True
        self._application = application
        self._loop = loop
        self._observer = observer
        self._turns = turns
        self._limits = limits
        self._pings = pings
        self._put_off = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self.descriptor = descriptor_of(transport)
        self._transport.set_write_buffer_limits(high=MAX_SEND_FRAME_SIZE)
        self.writer = Http2FrameWriter(self._loop, self._transport)
        self.session = Http2Session(
            self, self._application, self._loop, self.writer, self._turns, self._limits.budget, self._pings
        )
        self._stalls = StallWatch(self._limits, monotonic())
        self.reader = Http2FrameReader(self.session, self._turns)
        self.writer.write(_GREETING)
        self._observer.on_connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        session = self.session
        session.end()
        self._observer.on_connection_lost(self)
        # The session holds the connection: without a cycle all are freed at once, not by the garbage collector.
        del self.session, self.reader

    def pause_writing(self) -> None:
        self.writer.paused = True

    def resume_writing(self) -> None:
        self.writer.resume()

    def data_received(self, data: bytes) -> None:
        if self.session.closed:
            return
        self.active = True
        if self._put_off or (len(data) > _SMALL_READ and self._turns.over()):
            self.reader.put_off(data)
            self._continue_later()
        else:
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        """Let the reader read, and see to what is left, or wrong."""
        self.writer.cork()
        try:
            if not self.reader.feed(data):
                self._continue_later()
        except ConnectionFault as fault:
            if fault.code is Http2ErrorCode.ENHANCE_YOUR_CALM:
                self._limits.counts.closed_for("grpc", "pings" if str(fault) == TOO_MANY_PINGS else "flood")
            self.fail(fault.code, str(fault))
        except Exception:
            LOGGER.exception("gRPC connection failed")
            self.fail(Http2ErrorCode.INTERNAL_ERROR, "")
        self.writer.flush()

    def _continue_later(self) -> None:
        if not self._put_off and not self._transport.is_closing():
            self._put_off = True
            self._transport.pause_reading()
            self._turns.later(self._continue)

    def _continue(self) -> None:
        """Handle more of what was put off, in a later turn."""
        self._put_off = False
        if self._transport.is_closing():
            return
        self._handle(b"")
        if not self._put_off and not self._transport.is_closing():
            self._transport.resume_reading()

    # Called by the front end

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        """End the connection at once with a GOAWAY; every stream is reset."""
        if self.session.closed:
            return
        self.session.end()
        if self.writer.paused:
            self._transport.abort()
            return
        self.writer.write(frames.goaway(self.session.last_stream, code, message))
        self.writer.flush()
        self._transport.close()

    def sweep(self, now: float) -> None:
        """End what the client has taken too long for, at ``now`` (s, monotonic)."""
        self._stalls.look(self, now)

    def drain(self) -> None:
        """Accept no new streams, and close when those that are open have ended."""
        self.session.drain()

    def ping(self) -> None:
        """Send a PING, whose answer will set ``active``."""
        self.writer.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    # Called by the session

    def on_drained(self) -> None:
        self.writer.flush()
        self._transport.close()
