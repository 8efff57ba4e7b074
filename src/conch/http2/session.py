"""The HTTP/2 protocol of a connection (RFC 9113): applies the client's frames to its streams.

Each :class:`~conch.http2.connection.Http2Connection` has a session, which its frame reader calls on the
event loop. Its ``Http2Application`` parses header fields and handles streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from conch.http2 import frames, limits
from conch.http2.frame_writer import MAX_SEND_FRAME_SIZE, Http2FrameWriter
from conch.http2.frames import ConnectionFault, Http2ErrorCode, StreamFault
from conch.http2.headers import HeaderDecoder, PartialHeaderBlock
from conch.http2.limits import FloodGuard, Http2Limits, PingStrikes
from conch.http2.streams import Http2Application, Http2Stream

_SETTINGS_ACK: Final = frames.frame(frames.SETTINGS, frames.ACK, 0)
TOO_MANY_PINGS: Final = "too_many_pings"
#: The payload of the ping after the first GOAWAY.
_DRAIN_PING: Final = b"conch-go"
#: Maximum number of remembered streams that the server closed before the client: their late frames are not an error.
_MAX_CLOSED_EARLY: Final = 4 * limits.MAX_STREAMS


class SessionOwner(Protocol):
    """The part of a connection that its session uses."""

    def on_drained(self) -> None:
        """Close a draining connection; called when its last stream has ended."""


class Http2Session:
    """The state of a connection: ``streams`` are the open ones by ID; ``closed`` is set when input no longer matters.

    ``greeted`` is true once the client's SETTINGS have arrived, ``last_stream`` is the highest stream that it has
    opened, ``blocks`` counts header blocks that arrive in several frames.
    """

    def __init__(
        self,
        owner: SessionOwner,
        application: Http2Application,
        loop: asyncio.AbstractEventLoop,
        writer: Http2FrameWriter,
        client_limits: Http2Limits,
    ) -> None:
        self.streams: dict[int, Http2Stream] = {}
        self.budget = client_limits.budget
        self.loop_budget = client_limits.loop_budget
        self.closed = False
        self.greeted = False
        self.last_stream = 0
        self.blocks = 0
        self._owner = owner
        self._application = application
        self._loop = loop
        self._writer = writer
        self._decoder: HeaderDecoder[Any] = HeaderDecoder(application.parse)
        self._draining = False
        #: The last stream that is served, set once the client has been informed.
        self._last_accepted: int | None = None
        self._send_window = frames.DEFAULT_WINDOW
        self._receive_window = limits.CONNECTION_WINDOW
        self._block: PartialHeaderBlock | None = None
        self._closed_early: dict[int, None] = {}
        self._floods = FloodGuard()
        #: Overhead frames that have not been checked yet.
        self._overhead = 0
        #: Calls completed since the last reset.
        self._completed = 0
        self._strikes = PingStrikes(client_limits.pings)
        self._useful = 0
        #: The total of the windows that the client has given the connection (bytes).
        self._given_window = frames.DEFAULT_WINDOW

    @property
    def in_header_block(self) -> bool:
        """Whether a header block has arrived in part."""
        return self._block is not None

    # Called by the connection

    def drain(self) -> None:
        """Accept no new streams, and notify the owner when the open ones have ended.

        The first GOAWAY refuses nothing yet. When the ping after it is acknowledged, the client has received it, and
        everything that the client sent before has arrived. A second GOAWAY then names the last accepted stream.
        """
        if not self._draining and not self.closed:
            self._draining = True
            self._writer.write(
                frames.goaway(frames.MAX_WINDOW, Http2ErrorCode.NO_ERROR) + frames.frame(frames.PING, 0, 0, _DRAIN_PING)
            )

    def end(self) -> None:
        """Reset every stream; called when the connection has ended or is about to end."""
        self.closed = True
        for stream in list(self.streams.values()):
            self._drop(stream)

    # Called by streams

    def on_stream_closed(self, stream: Http2Stream, *, completed: bool) -> None:
        """Remove a stream that has ended or was reset; one ``completed`` makes a later reset plausible."""
        stream.discard()
        if self.streams.pop(stream.id, None) is None:
            return
        if not stream.remote_ended:
            self._remember_closed(stream.id)
        if completed:
            self._completed += 1
        if self._last_accepted is not None and not self.streams and not self.closed:
            self._finish()

    def _finish(self) -> None:
        self.closed = True
        self._owner.on_drained()

    def _remember_closed(self, stream_id: int) -> None:
        self._closed_early[stream_id] = None
        if len(self._closed_early) > _MAX_CLOSED_EARLY:
            del self._closed_early[next(iter(self._closed_early))]

    def _drop(self, stream: Http2Stream) -> None:
        """Close a stream after a reset by the client or an error, and notify its handler."""
        handler = stream.handler
        self.on_stream_closed(stream, completed=False)
        handler.on_reset()

    # Called by the frame reader

    def on_data(self, stream_id: int, length: int, payload: int, last: bool) -> Http2Stream | None:
        """Count a DATA frame against the receive windows; returns the stream that receives its payload, if any."""
        if self._block is not None:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if payload < limits.TINY_DATA and not last:
            self._count_overhead()
        self._receive_window -= length
        if self._receive_window <= limits.CONNECTION_WINDOW // 2:
            self._restore_receive_window()
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            if stream_id not in self._closed_early:
                self._count_overhead()
            return None
        if stream.remote_ended or length > stream.receive_window:
            code = Http2ErrorCode.STREAM_CLOSED if stream.remote_ended else Http2ErrorCode.FLOW_CONTROL_ERROR
            self._reset(stream_id, code)
            return None
        stream.receive_window -= length - payload
        if stream.content_left is not None:
            stream.content_left -= payload
            if stream.content_left < 0 or (last and stream.content_left):
                self._reset(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
                return None
        return stream

    def on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame of any type but DATA."""
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "header block interrupted")
        if not self.greeted and kind != frames.SETTINGS:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        handler = _HANDLERS.get(kind)
        if handler is None:
            self._count_overhead()
            return
        try:
            handler(self, flags, stream_id, payload)
        except StreamFault as fault:
            self._reset(stream_id, fault.code)

    def _restore_receive_window(self) -> None:
        if self._receive_window < 0:
            raise ConnectionFault(
                Http2ErrorCode.FLOW_CONTROL_ERROR, "the flow-control window of the connection is exceeded"
            )
        self._writer.write(frames.window_update(0, limits.CONNECTION_WINDOW - self._receive_window))
        self._receive_window = limits.CONNECTION_WINDOW

    def _reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        """Reset a stream on which the client violated a rule."""
        self._count_reset()
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
        else:
            self._remember_closed(stream_id)
        self._writer.write(frames.rst_stream(stream_id, code))

    def _count_reset(self) -> None:
        """Count a stream that was reset; completed calls make some resets plausible."""
        self._floods.resets.allow(self._completed)
        self._completed = 0
        self._floods.resets.take(self._loop.time())

    def _count_overhead(self) -> None:
        """Count an overhead frame; data sent to the client makes some plausible."""
        self._overhead += 1
        if self._overhead >= limits.OVERHEAD_BATCH:
            sent = self._given_window - self._writer.window
            self._floods.take_overhead(self._overhead, sent, self._writer.messages, self._loop.time())
            self._overhead = 0

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self.last_stream or stream_id % 2 == 0:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} does not exist")

    # HEADERS and CONTINUATION

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.without_padding(flags, payload)
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, payload)
        else:
            self.blocks += 1
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
            trailers = self._decoder.fields(block)
            if stream.remote_ended:
                raise StreamFault(Http2ErrorCode.STREAM_CLOSED, "headers after the end")
            if not flags & frames.END_STREAM:
                raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
            self._application.check_trailers(trailers)
            self._end_body(stream)
        elif stream_id > self.last_stream and stream_id % 2:
            self._open(flags, stream_id, block)
        elif stream_id in self._closed_early:
            self._decoder.fields(block)
        else:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} cannot be opened")

    def _open(self, flags: int, stream_id: int, block: bytes) -> None:
        self.last_stream = stream_id
        head = self._decoder.head(block)
        if len(self.streams) >= limits.MAX_STREAMS or self._last_accepted is not None:
            raise StreamFault(Http2ErrorCode.REFUSED_STREAM, "no more streams now")
        stream = Http2Stream(self, self._writer, stream_id, self._send_window, self._loop.time())
        self.streams[stream_id] = stream
        handler = self._application.open(stream, head)
        if stream.closed:
            return
        stream.handler = handler
        if flags & frames.END_STREAM:
            self._end_body(stream)

    def _end_body(self, stream: Http2Stream) -> None:
        """End the body of a stream; called for a frame other than DATA."""
        if stream.content_left:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "the body is shorter than its content-length")
        stream.receive(b"", True)

    # Control frames

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_overhead()
        if not stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of the wrong size")

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of the wrong size")
        self._check_not_idle(stream_id)
        stream = self.streams.get(stream_id)
        if stream is not None:
            if self._loop.time() - stream.opened < limits.SUDDEN:
                self._count_reset()
            self._drop(stream)
        else:
            self._count_overhead()
        self._closed_early.pop(stream_id, None)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of the wrong size")
        self._floods.settings.take(self._loop.time())
        if flags & frames.ACK:
            return
        self.greeted = True
        for setting, value in frames.read_settings(payload).items():
            self._apply_setting(setting, value)
        self._writer.write(_SETTINGS_ACK)
        self._writer.pump()

    def _apply_setting(self, setting: int, value: int) -> None:
        if setting == frames.INITIAL_WINDOW_SIZE:
            increment = value - self._send_window
            largest = max((stream.send_window for stream in self.streams.values()), default=0)
            if largest + increment > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            self._send_window = value
            for stream in list(self.streams.values()):
                stream.increase_send_window(increment)
        elif setting == frames.MAX_FRAME_SIZE:
            self._writer.frame_size = min(value, MAX_SEND_FRAME_SIZE)
        elif setting == frames.HEADER_TABLE_SIZE:
            # Responses use no dynamic table, but a smaller one must be acknowledged (RFC 7541, 4.2).
            self._writer.block_prefix = b"\x20"

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PING of the wrong size")
        self._floods.pings.take(self._loop.time())
        if not flags & frames.ACK:
            self._count_ping()
            self._writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _DRAIN_PING and self._draining and self._last_accepted is None:
            self._last_accepted = self.last_stream
            self._writer.write(frames.goaway(self.last_stream, Http2ErrorCode.NO_ERROR))
            if not self.streams:
                self._finish()

    def _count_ping(self) -> None:
        """Count a ping; refuses a client that pings too often, with the message that gRPC clients recognize."""
        if self._writer.useful != self._useful:
            self._useful = self._writer.useful
            self._strikes.reset()
        if self._strikes.are_too_many(self._loop.time(), calls=bool(self.streams)):
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, TOO_MANY_PINGS)

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Validate the frame only: the client closes the connection when it has its responses."""
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of the wrong size")
        self._count_overhead()

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of the wrong size")
        self._count_overhead()
        increment = frames.WORD.unpack(payload)[0] & frames.MAX_WINDOW
        if not stream_id:
            self._given_window += increment
            self._writer.window += increment
            if not increment or self._writer.window > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
            self._writer.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
        elif not increment or stream.send_window + increment > frames.MAX_WINDOW:
            raise StreamFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window increment out of range")
        else:
            stream.increase_send_window(increment)


_HANDLERS: Final[dict[int, Callable[[Http2Session, int, int, bytes], None]]] = {
    frames.HEADERS: Http2Session._on_headers,
    frames.PRIORITY: Http2Session._on_priority,
    frames.RST_STREAM: Http2Session._on_rst_stream,
    frames.SETTINGS: Http2Session._on_settings,
    frames.PUSH_PROMISE: Http2Session._on_push_promise,
    frames.PING: Http2Session._on_ping,
    frames.GOAWAY: Http2Session._on_goaway,
    frames.WINDOW_UPDATE: Http2Session._on_window_update,
    frames.CONTINUATION: Http2Session._on_continuation,
}
