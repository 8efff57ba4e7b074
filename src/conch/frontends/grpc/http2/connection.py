"""An HTTP/2 server connection (RFC 9113), as far as gRPC needs one: frames in, streams and their events out.

One ``Connection`` per TCP connection, made by :mod:`conch.frontends.grpc.server`; runs on the
event loop.  It knows nothing of gRPC: an ``Http2Application`` makes sense of header fields and opens
streams.  Left out, because no gRPC client uses it: server push, priorities, upgrades from HTTP/1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, cast

from conch.frontends.grpc.http2 import frames, limits
from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode, StreamFault
from conch.frontends.grpc.http2.framing import Http2FrameReader
from conch.frontends.grpc.http2.headers import MAX_HEADER_LIST, HeaderDecoder
from conch.frontends.grpc.http2.limits import Allowance, MessageBudget
from conch.frontends.grpc.http2.outbox import MAX_TURN, Outbox
from conch.frontends.grpc.http2.roles import ConnectionOwner, Http2Application
from conch.frontends.grpc.http2.streams import Stream

LOGGER: Final = logging.getLogger("conch")

#: The connection's own window never holds a client up: what a stream may send is bounded by its window.
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
#: What the server's own pings carry.
_DRAIN_PING: Final = b"conch-go"
_KEEPALIVE_PING: Final = b"conch-ka"
#: Streams closed before their client had ended them, whose late frames are no fault.
_REMEMBERED: Final = 4 * limits.MAX_STREAMS


class Connection(asyncio.Protocol):
    """``active`` is set by whatever arrives, ``closed`` once nothing that arrives counts any more."""

    outbox: Outbox
    _transport: asyncio.Transport

    def __init__(self, application: Http2Application, loop: asyncio.AbstractEventLoop, owner: ConnectionOwner) -> None:
        self.streams: dict[int, Stream] = {}
        self.budget = MessageBudget(limits.MESSAGE_BUDGET)
        self.active = True
        self.closed = False
        self._application = application
        self._loop = loop
        self._owner = owner
        self._reader = Http2FrameReader(self)
        self._decoder: HeaderDecoder[Any] = HeaderDecoder(application.parse)
        self._settings_seen = False
        self._draining = False
        self._last_stream = 0
        #: The last stream that is served, once the client knows that there are no more.
        self._last_accepted: int | None = None
        self._send_window = frames.DEFAULT_WINDOW
        self._receive_window = _WINDOW
        #: A header block of which not everything has arrived: its stream, the flags of HEADERS, its parts.
        self._block: tuple[int, int, list[bytes]] | None = None
        self._closed_early: dict[int, None] = {}
        self._resets = Allowance("stream resets", 10_000, 2000)
        self._settings = Allowance("SETTINGS frames", 1000, 100)
        self._pings = Allowance("PING frames", 20_000, 5000)
        self._idle_frames = Allowance("frames without effect", 10_000, 1000)
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

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_TURN)
        self.outbox = Outbox(self._loop, self._transport)
        self.outbox.write(_GREETING)
        self._owner.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_streams()
        self._owner.gone(self)

    def pause_writing(self) -> None:
        self.outbox.paused = True

    def resume_writing(self) -> None:
        self.outbox.resume()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self.active = True
        self.outbox.cork()
        try:
            self._reader.feed(data)
        except ConnectionFault as fault:
            self.fail(fault.code, str(fault))
        except Exception:
            LOGGER.exception("gRPC connection failed")
            self.fail(Http2ErrorCode.INTERNAL_ERROR, "")
        self.outbox.flush()

    # The owner's side

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        """End the connection now: GOAWAY, every stream reset."""
        if self.closed:
            return
        self._end_streams()
        if self.outbox.paused:
            self._transport.abort()
            return
        self.outbox.write(frames.goaway(self._last_stream, code, message))
        self.outbox.flush()
        self._transport.close()

    def drain(self) -> None:
        """Let the client finish what it has begun and begin nothing more; then close.

        A GOAWAY that refuses nothing yet comes first; when the ping behind it is answered, the
        client has seen it, and what it had sent before has arrived.
        """
        if not self._draining and not self.closed:
            self._draining = True
            self.outbox.write(
                frames.goaway(frames.MAX_WINDOW, Http2ErrorCode.NO_ERROR) + frames.frame(frames.PING, 0, 0, _DRAIN_PING)
            )

    def ping(self) -> None:
        """Ask for a sign of life, which will set ``active``."""
        self.outbox.write(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    def forget(self, stream: Stream) -> None:
        """The stream has ended from the server's side, or was reset."""
        stream.discard()
        if self.streams.pop(stream.id, None) is None:
            return
        if not stream.remote_ended:
            self._remember(stream.id)
        if self._last_accepted is not None and not self.streams and not self.closed:
            self._close_gently()

    def _remember(self, stream_id: int) -> None:
        self._closed_early[stream_id] = None
        if len(self._closed_early) > _REMEMBERED:
            del self._closed_early[next(iter(self._closed_early))]

    def _close_gently(self) -> None:
        self.closed = True
        self.outbox.flush()
        self._transport.close()

    def _end_streams(self) -> None:
        self.closed = True
        for stream in list(self.streams.values()):
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """The stream is gone for both sides."""
        receiver = stream.receiver
        self.forget(stream)
        receiver.reset()

    # The frame reader's side

    def on_data(self, stream_id: int, length: int, payload: int, last: bool) -> Stream | None:
        """A DATA frame of ``length`` bytes, padding included, has begun; returns the stream to give its payload to."""
        if self._block is not None:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if not payload and not last:
            self._idle_frames.take(self._loop.time())
        self._receive_window -= length
        if self._receive_window <= _WINDOW // 2:
            self._credit()
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            if stream_id not in self._closed_early:
                self._idle_frames.take(self._loop.time())
            return None
        if stream.remote_ended or length > stream.receive_window:
            code = Http2ErrorCode.STREAM_CLOSED if stream.remote_ended else Http2ErrorCode.FLOW_CONTROL_ERROR
            self._reset(stream_id, code)
            return None
        stream.receive_window -= length - payload
        return stream

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle any other frame."""
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if not self._settings_seen and kind != frames.SETTINGS:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        handler = self._handlers.get(kind)
        if handler is None:
            self._idle_frames.take(self._loop.time())
            return
        try:
            handler(flags, stream_id, payload)
        except StreamFault as fault:
            self._reset(stream_id, fault.code)

    def _credit(self) -> None:
        if self._receive_window < 0:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is exceeded")
        self.outbox.write(frames.window_update(0, _WINDOW - self._receive_window))
        self._receive_window = _WINDOW

    def _reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        """The client broke a rule of this stream."""
        self._resets.take(self._loop.time())
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
        else:
            self._remember(stream_id)
        self.outbox.write(frames.rst_stream(stream_id, code))

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
            self._block = (stream_id, flags, [payload])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        _, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > limits.MAX_CONTINUATIONS or sum(map(len, parts)) > limits.MAX_HEADER_BLOCK:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(first_flags, stream_id, b"".join(parts))

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """A whole header block: a new request, or the trailers of one."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._decoder.fields(block)
            if stream.remote_ended:
                raise StreamFault(Http2ErrorCode.STREAM_CLOSED, "headers after the end")
            if not flags & frames.END_STREAM:
                raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
            stream.deliver(b"", True)
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
        stream = Stream(self, self.outbox, stream_id, self._send_window)
        self.streams[stream_id] = stream
        receiver = self._application.open(stream, head)
        if stream.closed:
            return
        stream.receiver = receiver
        if flags & frames.END_STREAM:
            stream.deliver(b"", True)

    # Control frames

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._idle_frames.take(self._loop.time())
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
        self.outbox.write(_SETTINGS_ACK)
        self.outbox.pump()

    def _apply_setting(self, setting: int, value: int) -> None:
        if setting == frames.INITIAL_WINDOW_SIZE:
            increment = value - self._send_window
            largest = max((stream.send_window for stream in self.streams.values()), default=0)
            if value > frames.MAX_WINDOW or largest + increment > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            self._send_window = value
            for stream in list(self.streams.values()):
                stream.widen(increment)
        elif setting == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_SIZE <= value < 1 << 24:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "frame size out of range")
            self.outbox.frame_size = min(value, MAX_TURN)
        elif setting == frames.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        elif setting == frames.HEADER_TABLE_SIZE and value < 4096:
            # The answers use no dynamic table, but a smaller one has to be acknowledged (RFC 7541, 4.2).
            self.outbox.block_prefix = b"\x20"

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._pings.take(self._loop.time())
        if not flags & frames.ACK:
            self.outbox.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN_PING and self._draining and self._last_accepted is None:
            self._last_accepted = self._last_stream
            self.outbox.write(frames.goaway(self._last_stream, Http2ErrorCode.NO_ERROR))
            if not self.streams:
                self._close_gently()

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """The client will close when it has its answers; nothing to do until then."""
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._idle_frames.take(self._loop.time())

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        increment = frames.WORD.unpack(payload)[0] & frames.MAX_WINDOW
        if not stream_id:
            self.outbox.window += increment
            if not increment or self.outbox.window > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
            self.outbox.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
        elif not increment or stream.send_window + increment > frames.MAX_WINDOW:
            raise StreamFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
        else:
            stream.widen(increment)
