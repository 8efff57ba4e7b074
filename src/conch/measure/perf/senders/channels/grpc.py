"""HTTP/2 connections for gRPC: one carries several unary calls, or a ``ModelStreamInfer`` call of a caller.

They implement the required parts of RFC 9113 with the frame codec of the server's front end. gRPC's library takes
several times as long per call, and would measure itself. Runs on the event loop of a sending process.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Final, NamedTuple
from urllib.parse import unquote

import hpack
from google.protobuf.message import DecodeError

from conch.core.protocol import grpc_service
from conch.http2 import Field, HeaderDecoder, frames
from conch.measure.perf.requests.encoding import ID_SIZE
from conch.measure.perf.senders.channels.connecting import Address, Connecting
from conch.measure.perf.senders.records import Judge, Outcome, TimedCall


@dataclass(frozen=True, slots=True)
class Rpc:
    """A gRPC method: its path, the metadata of each call, and the compression of messages (empty: none)."""

    path: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    encoding: str = ""


class RpcStatus(NamedTuple):
    """The status in a header block: that of HTTP, and that of gRPC if the block has it."""

    http: int | None
    grpc: int | None
    message: str


def status_of(fields: Sequence[Field]) -> RpcStatus:
    """Return the status in a block of headers or trailers."""
    headers = dict(fields)
    http, grpc = headers.get(b":status"), headers.get(b"grpc-status")
    message = unquote(headers.get(b"grpc-message", b"").decode("latin-1"))
    return RpcStatus(int(http) if http is not None else None, int(grpc) if grpc is not None else None, message)


#: Number of concurrent calls per connection, as in NVIDIA's clients, where that many share a channel.
SHARED_BY: Final = 6
#: Receive window of the connection and of each stream (bytes).
_WINDOW: Final = frames.MAX_WINDOW
_GREETING: Final = (
    frames.PREFACE
    + frames.settings({frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: _WINDOW})
    + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
)
_SETTINGS_ACK: Final = frames.frame(frames.SETTINGS, frames.ACK, 0)


class _CallStream:
    """A stream and the call that it carries; ``in_flight`` is whether a request of the call has no response yet."""

    __slots__ = ("call", "flags", "id", "in_flight", "left", "number", "received", "response", "window")

    def __init__(self, number: int, call: TimedCall, window: int) -> None:
        self.number = number
        self.call = call
        self.in_flight = False
        #: Remaining send window (bytes).
        self.window = window
        #: The part of the message that waits for flow-control window, and the flags of its last frame.
        self.left = memoryview(b"")
        self.flags = 0
        #: The received part of a response that is examined.
        self.response = b""
        #: The id of the request in flight, and the bytes received since the last window update; of streaming calls.
        self.id = ""
        self.received = 0


class GrpcChannel(Connecting):
    """Sends prepared messages to one method, each in its own stream.

    ``judge`` validates responses; without it, their content is ignored.
    """

    protocols = ("h2",)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: Address, method: Rpc, judge: Judge | None = None
    ) -> None:
        super().__init__(loop, address)
        self._method = method
        self._judge = judge
        #: Whether the data of responses is kept.
        self._examines = judge is not None
        #: Calls that wait for a connection.
        self._unsent: deque[TimedCall] = deque()
        self._reset()

    def _reset(self) -> None:
        self._decoder: HeaderDecoder[RpcStatus] = HeaderDecoder(status_of)
        self._encoder = hpack.Encoder()
        self._head = b""
        self._rest = b""
        self._out: list[bytes | memoryview] = []
        #: Calls whose last bytes are in the transport's buffer.
        self._writing: list[TimedCall] = []
        #: Calls whose last bytes are in ``_out``.
        self._ending: list[TimedCall] = []
        self._next_stream = 1
        self._going_away = False
        self._frame_size = frames.DEFAULT_FRAME_SIZE
        self._stream_window = frames.DEFAULT_WINDOW
        self._window = frames.DEFAULT_WINDOW
        self._received = 0
        self._block: tuple[int, int, bytes] | None = None
        self._streams: dict[int, _CallStream] = {}
        self._stream_of: dict[TimedCall, _CallStream] = {}
        #: Streams with a message that is partly sent.
        self._sending: dict[int, _CallStream] = {}
        self._in_flight = 0

    @property
    def room(self) -> int:
        return SHARED_BY - self._in_flight - len(self._unsent)

    def send(self, call: TimedCall) -> None:
        call.channel = self
        if self.transport is None or self._going_away:
            call.sent = monotonic_ns()
            self._unsent.append(call)
            if self.transport is None:
                self.connect()
        else:
            self._open(call)
            # Each call is flushed separately, even if reading a response starts several, as callers are independent.
            self._flush()

    def cancel(self, call: TimedCall) -> None:
        if call in self._unsent:
            self._unsent.remove(call)
        elif (stream := self._stream_of.get(call)) is not None and stream.in_flight:
            self._in_flight -= 1
            self._forget(stream)
            self._out.append(frames.rst_stream(stream.number, frames.Http2ErrorCode.CANCEL))
            self._flush()

    # Called by the transport

    def on_connected(self) -> None:
        self._reset()
        self._out.append(_GREETING)
        self._flush()
        while self._unsent:
            self._open(self._unsent.popleft())
            self._flush()

    def on_lost(self, error: str) -> None:
        calls = [*self._take_calls(), *self._unsent]
        self._unsent.clear()
        self._writing.clear()
        for call in calls:
            call.finish(Outcome.CONNECTION_LOST, error)

    def resume_writing(self) -> None:
        now = monotonic_ns()
        for call in self._writing:
            call.written = now
        self._writing.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._read(self._rest + data if self._rest else data)
        except frames.ConnectionFault as fault:
            self.close()
            self._fail(str(fault))
        except (IndexError, ValueError, struct.error, DecodeError) as error:
            self.close()
            self._fail(f"the response cannot be read: {error}")
        self._flush()

    # Sending

    def _open(self, call: TimedCall) -> None:
        self._send_message(self._open_stream(call), call.payload.data, frames.END_STREAM)

    def _open_stream(self, call: TimedCall) -> _CallStream:
        number = self._next_stream
        self._next_stream = number + 2
        head = self._head or self._encode_head()
        self._out.append(frames.FRAME.pack(len(head) << 8 | frames.HEADERS, frames.END_HEADERS, number))
        self._out.append(head)
        stream = self._streams[number] = self._stream_of[call] = _CallStream(number, call, self._stream_window)
        return stream

    def _send_message(self, stream: _CallStream, data: bytes, flags: int) -> None:
        """Send a request of the stream's call, as far as the windows allow."""
        stream.in_flight = True
        self._in_flight += 1
        stream.call.sent = monotonic_ns()
        size = len(data)
        if size <= self._frame_size and size <= self._window and size <= stream.window:
            self._window -= size
            stream.window -= size
            self._out.append(frames.FRAME.pack(size << 8 | frames.DATA, flags, stream.number))
            self._out.append(data)
            self._ending.append(stream.call)
        else:
            stream.left, stream.flags = memoryview(data), flags
            self._sending[stream.number] = stream
            self._pump()

    def _encode_head(self) -> bytes:
        """Return the header block of a call; after the first one, all its fields are in the server's dynamic table."""
        fields = [
            (b":method", b"POST"), (b":scheme", b"https" if self._address.encrypted else b"http"),
            (b":path", self._method.path.encode()), (b":authority", self._address.shown.encode()),
            (b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"conch-perf"),
            *((name.lower().encode(), value.encode()) for name, value in self._method.metadata.items()),
        ]  # fmt: skip
        if self._method.encoding:
            fields.append((b"grpc-encoding", self._method.encoding.encode()))
        first: bytes = self._encoder.encode(fields)
        second: bytes = self._encoder.encode(fields)
        self._head = second
        return first

    def _pump(self) -> None:
        """Send the pending messages as far as the windows allow."""
        for stream in list(self._sending.values()):
            while stream.left and (room := min(self._window, stream.window, self._frame_size)) > 0:
                part, stream.left = stream.left[:room], stream.left[room:]
                flags = 0 if stream.left else stream.flags
                self._out.append(frames.FRAME.pack(len(part) << 8 | frames.DATA, flags, stream.number))
                self._out.append(part)
                self._window -= len(part)
                stream.window -= len(part)
            if not stream.left:
                self._ending.append(stream.call)
                del self._sending[stream.number]

    def _flush(self) -> None:
        out, ending = self._out, self._ending
        if not out or self.transport is None:
            return
        self._out, self._ending = [], []
        if self.write(b"".join(out)):
            now = monotonic_ns()
            for call in ending:
                call.written = now
        else:
            self._writing += ending

    # Reading

    def _read(self, data: bytes) -> None:
        now = monotonic_ns()
        at, end = 0, len(data)
        while end - at >= 9:
            word, flags, number = frames.FRAME.unpack_from(data, at)
            size = word >> 8
            stop = at + 9 + size
            if stop > end:
                break
            kind = word & 0xFF
            if kind == frames.DATA:
                self._received += size
                if (stream := self._streams.get(number)) is not None:
                    self._on_data(stream, flags, size, now)
                    if self._examines and number in self._streams:
                        part = data[at + 9 : stop]
                        if flags & frames.PADDED:
                            part = frames.without_padding(frames.PADDED, part)
                        self._on_response_data(stream, part, now)
            elif kind == frames.HEADERS:
                block = data[at + 9 : stop]
                if flags & (frames.PADDED | frames.HAS_PRIORITY):
                    block = frames.without_padding(flags, block)
                if flags & frames.END_HEADERS:
                    self._on_block(number, flags, block, now)
                else:
                    self._block = (number, flags, block)
            else:
                self._on_control(kind, flags, number, data[at + 9 : stop], now)
            if self.transport is None:
                return
            at = stop
        self._rest = data[at:]
        if self._received >= _WINDOW // 2:
            self._out.append(frames.window_update(0, self._received))
            self._received = 0

    def _on_data(self, stream: _CallStream, flags: int, size: int, now: int) -> None:
        if stream.in_flight:
            call = stream.call
            if not call.first:
                call.first = now
            call.received += size
            if flags & frames.END_STREAM:
                self._end(stream, Outcome.UNREADABLE, "the stream ended without a status")

    def _on_response_data(self, stream: _CallStream, data: bytes, now: int) -> None:
        """Add a part of a response that is examined."""
        stream.response += data

    def _on_block(self, number: int, flags: int, block: bytes, now: int) -> None:
        status = self._decoder.head(block)  # also of unknown streams, because blocks share the decoder's state
        if (stream := self._streams.get(number)) is not None:
            self._on_status(stream, status, now, ended=bool(flags & frames.END_STREAM))

    def _on_status(self, stream: _CallStream, status: RpcStatus, now: int, *, ended: bool) -> None:
        call = stream.call
        if not call.first:
            call.first = now
        if not ended:
            return
        if status.grpc == 0:
            call.responses += 1
            wrong = self._judge(call.number, stream.response[5:], 0) if self._judge is not None else ""
            self._end(stream, Outcome.WRONG if wrong else Outcome.OK, wrong, end=now)
        elif status.grpc is not None:
            self._end(stream, Outcome.REFUSED, status.message, status.grpc)
        else:
            error = f"HTTP status {status.http} and no status of gRPC"
            self._end(stream, Outcome.REFUSED, error, status.http or 0)

    def _on_control(self, kind: int, flags: int, number: int, payload: bytes, now: int) -> None:
        stream = self._streams.get(number)
        if kind == frames.WINDOW_UPDATE:
            increment = frames.WORD.unpack(payload)[0]
            if not number:
                self._window += increment
            elif stream is not None:
                stream.window += increment
            self._pump()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._on_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._out.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            if stream is not None:
                self._end(stream, Outcome.REFUSED, "the server reset the stream", frames.WORD.unpack(payload)[0])
        elif kind == frames.GOAWAY:
            self._on_goaway(payload)
        elif kind == frames.CONTINUATION and self._block is not None:
            first, head_flags, block = self._block
            self._block = (first, head_flags, block + payload)
            if flags & frames.END_HEADERS:
                self._block = None
                self._on_block(first, head_flags, block + payload, now)

    def _on_settings(self, payload: bytes) -> None:
        values = frames.read_settings(payload)
        self._frame_size = values.get(frames.MAX_FRAME_SIZE, self._frame_size)
        if frames.INITIAL_WINDOW_SIZE in values:
            grown = values[frames.INITIAL_WINDOW_SIZE] - self._stream_window
            self._stream_window += grown
            for stream in self._streams.values():
                stream.window += grown
        self._out.append(_SETTINGS_ACK)
        self._pump()

    def _on_goaway(self, payload: bytes) -> None:
        """Let the calls that the server has accepted complete; other and new calls use a new connection."""
        last, code = frames.GOAWAY_HEAD.unpack_from(payload)
        why = payload[frames.GOAWAY_HEAD.size :].decode("utf-8", "replace")
        self._going_away = True
        for stream in [stream for number, stream in self._streams.items() if number > last]:
            self._end(stream, Outcome.CONNECTION_LOST, f"the server ended the connection: {why or code}", code)
        self._reconnect_when_idle()

    def _reconnect_when_idle(self) -> None:
        if self._going_away and not self._in_flight:
            self.close()
            self._going_away = False
            if self._unsent:
                self.connect()

    def _end(self, stream: _CallStream, outcome: Outcome, error: str, code: int = 0, end: int = 0) -> None:
        """End a stream, and its request in flight."""
        self._forget(stream)
        self._complete(stream, outcome, error, code, end)

    def _complete(self, stream: _CallStream, outcome: Outcome, error: str, code: int = 0, end: int = 0) -> None:
        """Complete the request in flight, if any."""
        if stream.in_flight:
            stream.in_flight = False
            self._in_flight -= 1
            stream.call.finish(outcome, error, code, end)
            if self._going_away:
                self._reconnect_when_idle()

    def _forget(self, stream: _CallStream) -> None:
        """Remove a stream that has ended."""
        del self._streams[stream.number], self._stream_of[stream.call]
        self._sending.pop(stream.number, None)

    def _take_calls(self) -> list[TimedCall]:
        """Return the calls in flight, and forget all streams."""
        calls = [stream.call for stream in self._streams.values() if stream.in_flight]
        self._streams.clear()
        self._stream_of.clear()
        self._sending.clear()
        self._in_flight = 0
        return calls

    def _fail(self, error: str) -> None:
        for call in self._take_calls():
            call.finish(Outcome.UNREADABLE, error)
        if self._unsent:
            self.connect()


_PREFIX: Final = 5


class StreamChannel(GrpcChannel):
    """A channel that sends requests in streams.

    ``decoupled`` is whether requests have any number of responses, the last of which is marked; otherwise each has one.
    Payloads end with the request's id (:func:`conch.measure.perf.requests.encoding.stream_message`).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: Address, method: Rpc, judge: Judge | None = None, *,
        decoupled: bool,
    ) -> None:  # fmt: skip
        super().__init__(loop, address, method, judge)
        self._examines = True
        self._decoupled = decoupled
        self._next_id = 0

    # Sending

    def _open(self, call: TimedCall) -> None:
        stream = self._stream_of.get(call) or self._open_stream(call)
        stream.id = f"{self._next_id:0{ID_SIZE}x}"
        self._next_id = (self._next_id + 1) % 16**ID_SIZE
        self._send_message(stream, call.payload.data[:-ID_SIZE] + stream.id.encode(), 0)

    # Reading

    def _on_data(self, stream: _CallStream, flags: int, size: int, now: int) -> None:
        super()._on_data(stream, flags, size, now)
        stream.received += size
        if stream.received >= _WINDOW // 2:
            self._out.append(frames.window_update(stream.number, stream.received))
            stream.received = 0

    def _on_status(self, stream: _CallStream, status: RpcStatus, now: int, *, ended: bool) -> None:
        if ended:  # the headers that begin a stream are not part of a response
            message = status.message or "the server ended the stream"
            self._end(stream, Outcome.REFUSED, message, status.grpc or status.http or 0)

    def _on_response_data(self, stream: _CallStream, data: bytes, now: int) -> None:
        if stream.response:
            data = stream.response + data
        at = 0
        while len(data) - at >= _PREFIX:
            stop = at + _PREFIX + int.from_bytes(data[at + 1 : at + _PREFIX], "big")
            if stop > len(data):
                break
            self._on_response(stream, data[at + _PREFIX : stop], now)
            at = stop
        stream.response = data[at:]

    def _on_response(self, stream: _CallStream, message: bytes, now: int) -> None:
        if not stream.in_flight:
            return
        call = stream.call
        response = grpc_service.ModelStreamInferResponse.FromString(message)
        inference = response.infer_response
        if inference.id and inference.id != stream.id:
            return
        if response.error_message:
            self._complete(stream, Outcome.REFUSED, response.error_message, end=now)
            return
        last = not self._decoupled or (
            "triton_final_response" in inference.parameters and inference.parameters["triton_final_response"].bool_param
        )
        if not last or inference.outputs or not self._decoupled:
            call.responses += 1
            if self._decoupled:
                call.events.append(now)
        if last:
            wrong = ""
            if self._judge is not None:
                wrong = self._judge(call.number, inference.SerializeToString(), 0)
            self._complete(stream, Outcome.WRONG if wrong else Outcome.OK, wrong, end=now)
