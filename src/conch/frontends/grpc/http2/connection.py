"""The server's side of an HTTP/2 connection (RFC 9113): what each frame of the client does to the streams.

One ``Http2Connection`` for each TCP connection, made by :mod:`conch.frontends.grpc.server`; runs on the event loop.  It
knows nothing of gRPC: its ``Http2Application`` parses header fields and handles streams.  Server push, priorities and
upgrades from HTTP/1 are left out, because no gRPC client uses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from conch.frontends.grpc.http2 import frames, limits
from conch.frontends.grpc.http2.application import Http2Application
from conch.frontends.grpc.http2.frame_reader import Http2FrameReader
from conch.frontends.grpc.http2.frame_writer import MAX_SEND_FRAME_SIZE, Http2FrameWriter
from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode, StreamFault
from conch.frontends.grpc.http2.headers import MAX_HEADER_LIST, HeaderDecoder, PartialHeaderBlock
from conch.frontends.grpc.http2.limits import MessageBudget, RateLimiter
from conch.frontends.grpc.http2.streams import Http2Stream

LOGGER: Final = logging.getLogger("conch")

#: The connection's receive window is never what holds a client up: each stream is bounded by its own.
_WINDOW: Final = 1 << 30
_GREETING: Final = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: limits.MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW,
        frames.MAX_FRAME_SIZE: limits.RECEIVE_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST,
    }
) + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
_SETTINGS_ACK: Final = frames.frame(frames.SETTINGS, frames.ACK, 0)
#: The payloads of the server's own pings.
_DRAIN_PING: Final = b"conch-go"
_KEEPALIVE_PING: Final = b"conch-ka"
#: How many streams are remembered that the server closed before the client had: their late frames are no fault.
_MAX_CLOSED_EARLY: Final = 4 * limits.MAX_STREAMS


class ConnectionObserver(Protocol):
    """Keeps track of the connections that are open; called on the event loop."""

    def on_connection_made(self, connection: Http2Connection) -> None:
        """The connection can be used; TLS, if any, is established."""

    def on_connection_lost(self, connection: Http2Connection) -> None:
        """The connection has ended; called once for each that was made."""


class Http2Connection(asyncio.Protocol):
    """``active`` is set when something arrives, ``closed`` once nothing that arrives counts any more."""

    writer: Http2FrameWriter
    _transport: asyncio.Transport

    def __init__(
        self, application: Http2Application, loop: asyncio.AbstractEventLoop, observer: ConnectionObserver
    ) -> None:
        self.streams: dict[int, Http2Stream] = {}
        self.budget = MessageBudget(limits.MESSAGE_BUDGET)
        self.active = True
        self.closed = False
        self._application = application
        self._loop = loop
        self._observer = observer
        self._reader = Http2FrameReader(self)
        self._decoder: HeaderDecoder[Any] = HeaderDecoder(application.parse)
        self._settings_seen = False
        self._draining = False
        self._last_stream = 0
        #: The last stream that is served, once the client knows that there are no more.
        self._last_accepted: int | None = None
        self._send_window = frames.DEFAULT_WINDOW
        self._receive_window = _WINDOW
        self._block: PartialHeaderBlock | None = None
        self._closed_early: dict[int, None] = {}
        self._resets = RateLimiter("stream resets", 10_000, 2000)
        self._settings = RateLimiter("SETTINGS frames", 1000, 100)
        self._pings = RateLimiter("PING frames", 20_000, 5000)
        self._ineffective = RateLimiter("frames without effect", 10_000, 1000)
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.HEADERS: self._on_headers,
            frames.PRIORITY: self._on_priority,
            frames.RST_STREAM: self._on_rst_stream,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push_promise,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_SEND_FRAME_SIZE)
        self.writer = Http2FrameWriter(self._loop, self._transport)
        self.writer.write(_GREETING)
        self._observer.on_connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_streams()
        self._observer.on_connection_lost(self)

    def pause_writing(self) -> None:
        self.writer.paused = True

    def resume_writing(self) -> None:
        self.writer.resume()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self.active = True
        self.writer.cork()
        try:
            self._reader.feed(data)
        except ConnectionFault as fault:
            self.fail(fault.code, str(fault))
        except Exception:
            LOGGER.exception("gRPC connection failed")
            self.fail(Http2ErrorCode.INTERNAL_ERROR, "")
        self.writer.flush()

    # Called by the front end

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        """End the connection at once with a GOAWAY; every stream is reset."""
        if self.closed:
            return
        self._end_streams()
        if self.writer.paused:
            self._transport.abort()
            return
        self.writer.write(frames.goaway(self._last_stream, code, message))
        self.writer.flush()
        self._transport.close()

    def drain(self) -> None:
        """Accept no new streams, and close when those that are open have ended.

        The first GOAWAY refuses nothing yet.  When the ping behind it is answered, the client has seen it and
        everything that it sent before has arrived: a second GOAWAY then names the last stream accepted.
        """
        if not self._draining and not self.closed:
            self._draining = True
            self.writer.write(
                frames.goaway(frames.MAX_WINDOW, Http2ErrorCode.NO_ERROR) + frames.frame(frames.PING, 0, 0, _DRAIN_PING)
            )

    def ping(self) -> None:
        """Send a PING, whose answer will set ``active``."""
        self.writer.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    # Called by streams

    def on_stream_closed(self, stream: Http2Stream) -> None:
        """Forget a stream that the server has ended, or that was reset; close if it was the last while draining."""
        stream.discard()
        if self.streams.pop(stream.id, None) is None:
            return
        if not stream.remote_ended:
            self._remember_closed(stream.id)
        if self._last_accepted is not None and not self.streams and not self.closed:
            self._close_gently()

    def _remember_closed(self, stream_id: int) -> None:
        self._closed_early[stream_id] = None
        if len(self._closed_early) > _MAX_CLOSED_EARLY:
            del self._closed_early[next(iter(self._closed_early))]

    def _close_gently(self) -> None:
        self.closed = True
        self.writer.flush()
        self._transport.close()

    def _end_streams(self) -> None:
        self.closed = True
        for stream in list(self.streams.values()):
            self._drop(stream)

    def _drop(self, stream: Http2Stream) -> None:
        """Close a stream that the client, or a fault, has reset, and tell its handler."""
        handler = stream.handler
        self.on_stream_closed(stream)
        handler.on_reset()

    # Called by the frame reader

    def on_data(self, stream_id: int, length: int, payload: int, last: bool) -> Http2Stream | None:
        """Count a DATA frame against the receive windows; returns the stream that receives its payload, if any."""
        if self._block is not None:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if not payload and not last:
            self._ineffective.take(self._loop.time())
        self._receive_window -= length
        if self._receive_window <= _WINDOW // 2:
            self._restore_receive_window()
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            if stream_id not in self._closed_early:
                self._ineffective.take(self._loop.time())
            return None
        if stream.remote_ended or length > stream.receive_window:
            code = Http2ErrorCode.STREAM_CLOSED if stream.remote_ended else Http2ErrorCode.FLOW_CONTROL_ERROR
            self._reset(stream_id, code)
            return None
        stream.receive_window -= length - payload
        return stream

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame of any type but DATA."""
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if not self._settings_seen and kind != frames.SETTINGS:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        handler = self._handlers.get(kind)
        if handler is None:
            self._ineffective.take(self._loop.time())
            return
        try:
            handler(flags, stream_id, payload)
        except StreamFault as fault:
            self._reset(stream_id, fault.code)

    def _restore_receive_window(self) -> None:
        if self._receive_window < 0:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        self.writer.write(frames.window_update(0, _WINDOW - self._receive_window))
        self._receive_window = _WINDOW

    def _reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        """End a stream for which the client broke a rule."""
        self._resets.take(self._loop.time())
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
        else:
            self._remember_closed(stream_id)
        self.writer.write(frames.rst_stream(stream_id, code))

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream or stream_id % 2 == 0:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} does not exist")

    # HEADERS and CONTINUATION

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.without_padding(flags, payload)
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, payload)
        else:
            self._block = PartialHeaderBlock(stream_id, flags, payload)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream_id != stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(block.flags, stream_id, block.joined())

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle a whole header block: the headers of a new request, or the trailers of an open one."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._decoder.fields(block)
            if stream.remote_ended:
                raise StreamFault(Http2ErrorCode.STREAM_CLOSED, "headers after the end")
            if not flags & frames.END_STREAM:
                raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
            stream.receive(b"", True)
        elif stream_id > self._last_stream and stream_id % 2:
            self._open(flags, stream_id, block)
        elif stream_id in self._closed_early:
            self._decoder.fields(block)
        else:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} cannot be opened")

    def _open(self, flags: int, stream_id: int, block: bytes) -> None:
        self._last_stream = stream_id
        head = self._decoder.head(block)
        if len(self.streams) >= limits.MAX_STREAMS or self._last_accepted is not None:
            raise StreamFault(Http2ErrorCode.REFUSED_STREAM, "no more streams now")
        stream = Http2Stream(self, self.writer, stream_id, self._send_window)
        self.streams[stream_id] = stream
        handler = self._application.open(stream, head)
        if stream.closed:
            return
        stream.handler = handler
        if flags & frames.END_STREAM:
            stream.receive(b"", True)

    # Control frames

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._ineffective.take(self._loop.time())
        if not stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of the wrong size")

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of the wrong size")
        self._check_not_idle(stream_id)
        self._resets.take(self._loop.time())
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
        self._closed_early.pop(stream_id, None)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        self._settings.take(self._loop.time())
        if flags & frames.ACK:
            return
        self._settings_seen = True
        for setting, value in frames.SETTING.iter_unpack(payload):
            self._apply_setting(setting, value)
        self.writer.write(_SETTINGS_ACK)
        self.writer.pump()

    def _apply_setting(self, setting: int, value: int) -> None:
        if setting == frames.INITIAL_WINDOW_SIZE:
            increment = value - self._send_window
            largest = max((stream.send_window for stream in self.streams.values()), default=0)
            if value > frames.MAX_WINDOW or largest + increment > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            self._send_window = value
            for stream in list(self.streams.values()):
                stream.increase_send_window(increment)
        elif setting == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_SIZE <= value < 1 << 24:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "frame size out of range")
            self.writer.frame_size = min(value, MAX_SEND_FRAME_SIZE)
        elif setting == frames.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        elif setting == frames.HEADER_TABLE_SIZE and value < 4096:
            # The answers use no dynamic table, but a smaller one has to be acknowledged (RFC 7541, 4.2).
            self.writer.block_prefix = b"\x20"

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._pings.take(self._loop.time())
        if not flags & frames.ACK:
            self.writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN_PING and self._draining and self._last_accepted is None:
            self._last_accepted = self._last_stream
            self.writer.write(frames.goaway(self._last_stream, Http2ErrorCode.NO_ERROR))
            if not self.streams:
                self._close_gently()

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Check the frame only: the client closes the connection when it has its responses."""
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._ineffective.take(self._loop.time())

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        increment = frames.WORD.unpack(payload)[0] & frames.MAX_WINDOW
        if not stream_id:
            self.writer.window += increment
            if not increment or self.writer.window > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
            self.writer.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
        elif not increment or stream.send_window + increment > frames.MAX_WINDOW:
            raise StreamFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
        else:
            stream.increase_send_window(increment)
