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
from tritonclient.grpc import service_pb2

from conch.http2 import Field, HeaderDecoder, frames
from conch.measure.perf.requests.encoding import ID_SIZE
from conch.measure.perf.senders.calls import Judge, TimedCall
from conch.measure.perf.senders.channels.connecting import Address, Connecting
from conch.measure.perf.senders.records import Outcome


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


class _Sending:
    """A message that is partly sent and waits for flow-control window; ``flags`` are the flags of its last frame."""

    def __init__(self, call: TimedCall, stream: int, data: bytes, flags: int) -> None:
        self.call = call
        self.stream = stream
        self.flags = flags
        self.left = memoryview(data)


class GrpcChannel(Connecting):
    """Sends prepared messages to one method, each in its own stream.

    ``judge`` validates responses; without it, their content is ignored.
    """

    protocols = ("h2",)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: Address, method: Rpc, judge: Judge | None = None,
        max_streams: int = SHARED_BY,
    ) -> None:  # fmt: skip
        super().__init__(loop, address)
        self._method = method
        self._judge = judge
        self._max_streams = max_streams
        self._calls: dict[int, TimedCall] = {}
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
        self._sending: dict[int, _Sending] = {}
        #: Remaining send windows of the streams for which they are tracked (bytes).
        self._windows: dict[int, int] = {}
        #: The received parts of responses that are examined.
        self._responses: dict[int, bytes] = {}

    @property
    def room(self) -> int:
        return self._max_streams - len(self._calls) - len(self._unsent)

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
            return
        for stream, pending in self._calls.items():
            if pending is call:
                del self._calls[stream]
                self._forget(stream)
                self._out.append(frames.rst_stream(stream, frames.Http2ErrorCode.CANCEL))
                self._flush()
                return

    # Called by the transport

    def on_connected(self) -> None:
        self._reset()
        self._out.append(_GREETING)
        self._flush()
        while self._unsent:
            self._open(self._unsent.popleft())
            self._flush()

    def on_lost(self, error: str) -> None:
        calls = [*self._calls.values(), *self._unsent]
        self._calls.clear()
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
        stream = self._open_stream()
        call.sent = monotonic_ns()
        self._calls[stream] = call
        if self._judge is not None:
            self._responses[stream] = b""
        self._send_message(stream, call, call.payload.data, frames.END_STREAM)

    def _open_stream(self) -> int:
        stream = self._next_stream
        self._next_stream = stream + 2
        head = self._head or self._encode_head()
        self._out.append(frames.FRAME.pack(len(head) << 8 | frames.HEADERS, frames.END_HEADERS, stream))
        self._out.append(head)
        return stream

    def _send_message(self, stream: int, call: TimedCall, data: bytes, flags: int) -> None:
        size = len(data)
        if size <= self._frame_size and size <= self._window and size <= self._windows.get(stream, self._stream_window):
            self._window -= size
            if stream in self._windows:
                self._windows[stream] -= size
            self._out.append(frames.FRAME.pack(size << 8 | frames.DATA, flags, stream))
            self._out.append(data)
            self._ending.append(call)
        else:
            self._windows.setdefault(stream, self._stream_window)
            self._sending[stream] = _Sending(call, stream, data, flags)
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
        for sending in list(self._sending.values()):
            stream = sending.stream
            while sending.left and (room := min(self._window, self._windows[stream], self._frame_size)) > 0:
                part, sending.left = sending.left[:room], sending.left[room:]
                flags = 0 if sending.left else sending.flags
                self._out.append(frames.FRAME.pack(len(part) << 8 | frames.DATA, flags, stream))
                self._out.append(part)
                self._window -= len(part)
                self._windows[stream] -= len(part)
            if not sending.left:
                self._ending.append(sending.call)
                del self._sending[stream]

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
            word, flags, stream = frames.FRAME.unpack_from(data, at)
            size = word >> 8
            stop = at + 9 + size
            if stop > end:
                break
            kind = word & 0xFF
            if kind == frames.DATA:
                self._on_data(stream, flags, size, now)
                if stream in self._responses:
                    part = data[at + 9 : stop]
                    if flags & frames.PADDED:
                        part = frames.without_padding(frames.PADDED, part)
                    self._on_response_data(stream, part, now)
            elif kind == frames.HEADERS:
                block = data[at + 9 : stop]
                if flags & (frames.PADDED | frames.HAS_PRIORITY):
                    block = frames.without_padding(flags, block)
                if flags & frames.END_HEADERS:
                    self._on_block(stream, flags, block, now)
                else:
                    self._block = (stream, flags, block)
            else:
                self._on_control(kind, flags, stream, data[at + 9 : stop], now)
            if self.transport is None:
                return
            at = stop
        self._rest = data[at:]

    def _on_data(self, stream: int, flags: int, size: int, now: int) -> None:
        self._received += size
        if self._received >= _WINDOW // 2:
            self._out.append(frames.window_update(0, self._received))
            self._received = 0
        call = self._calls.get(stream)
        if call is None:
            return
        if not call.first:
            call.first = now
        call.received += size
        if flags & frames.END_STREAM:
            self._end(stream, Outcome.UNREADABLE, 0, "the stream ended without a status")

    def _on_response_data(self, stream: int, data: bytes, now: int) -> None:
        """Add a part of a response that is examined."""
        self._responses[stream] += data

    def _on_block(self, stream: int, flags: int, block: bytes, now: int) -> None:
        end = self._decoder.head(block)
        call = self._calls.get(stream)
        if call is None:
            return
        if not call.first:
            call.first = now
        if not flags & frames.END_STREAM:
            return
        if end.grpc == 0:
            call.responses += 1
            wrong = self._judge(call.number, self._responses[stream][5:], 0) if self._judge is not None else ""
            self._end(stream, Outcome.WRONG if wrong else Outcome.OK, 0, wrong, now)
        elif end.grpc is not None:
            self._end(stream, Outcome.REFUSED, end.grpc, end.message)
        else:
            self._end(stream, Outcome.REFUSED, end.http or 0, f"HTTP status {end.http} and no status of gRPC")

    def _on_control(self, kind: int, flags: int, stream: int, payload: bytes, now: int) -> None:
        if kind == frames.WINDOW_UPDATE:
            increment = frames.WORD.unpack(payload)[0]
            if not stream:
                self._window += increment
            elif stream in self._windows:
                self._windows[stream] += increment
            if self._sending:
                self._pump()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._on_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._out.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            self._end(stream, Outcome.REFUSED, frames.WORD.unpack(payload)[0], "the server reset the stream")
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
            for stream in self._windows:
                self._windows[stream] += grown
        self._out.append(_SETTINGS_ACK)
        if self._sending:
            self._pump()

    def _on_goaway(self, payload: bytes) -> None:
        """Let the calls that the server has accepted complete; other and new calls use a new connection."""
        last, code = frames.GOAWAY_HEAD.unpack_from(payload)
        why = payload[frames.GOAWAY_HEAD.size :].decode("utf-8", "replace")
        self._going_away = True
        for stream in [call for call in self._calls if call > last]:
            self._end(stream, Outcome.CONNECTION_LOST, code, f"the server ended the connection: {why or code}")
        self._reconnect_when_idle()

    def _reconnect_when_idle(self) -> None:
        if self._going_away and not self._calls:
            self.close()
            self._going_away = False
            if self._unsent:
                self.connect()

    def _end(self, stream: int, outcome: Outcome, code: int, error: str, end: int = 0) -> None:
        call = self._calls.pop(stream, None)
        self._forget(stream)
        if call is not None:
            call.finish(outcome, error, code, end)
            if self._going_away:
                self._reconnect_when_idle()

    def _forget(self, stream: int) -> None:
        """Remove the state of a stream that has ended."""
        self._sending.pop(stream, None)
        self._windows.pop(stream, None)
        self._responses.pop(stream, None)

    def _fail(self, error: str) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.finish(Outcome.UNREADABLE, error)
        if self._unsent:
            self.connect()


_PREFIX: Final = 5
#: Number of received bytes in a stream after which its window is updated.
_WINDOW_UPDATE_BYTES: Final = frames.MAX_WINDOW // 2


class StreamChannel(GrpcChannel):
    """A channel that sends requests in streams.

    ``decoupled`` is whether requests have any number of responses, the last of which is marked; otherwise each has one.
    Payloads end with the request's id (:func:`conch.measure.perf.requests.encoding.stream_message`).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, address: Address, method: Rpc, judge: Judge | None = None, *,
        decoupled: bool, max_streams: int = SHARED_BY,
    ) -> None:  # fmt: skip
        super().__init__(loop, address, method, judge, max_streams)
        self._decoupled = decoupled
        self._next_id = 0

    def _reset(self) -> None:
        super()._reset()
        self._stream_of: dict[TimedCall, int] = {}
        self._ids: dict[int, str] = {}
        self._received_in: dict[int, int] = {}

    # Sending

    def _open(self, call: TimedCall) -> None:
        stream = self._stream_of.get(call)
        if stream is None:
            stream = self._stream_of[call] = self._open_stream()
            self._windows[stream] = self._stream_window
            self._responses[stream] = b""
            self._received_in[stream] = 0
        identity = f"{self._next_id:0{ID_SIZE}x}"
        self._next_id = (self._next_id + 1) % 16**ID_SIZE
        self._ids[stream] = identity
        self._calls[stream] = call
        call.sent = monotonic_ns()
        self._send_message(stream, call, call.payload.data[:-ID_SIZE] + identity.encode(), 0)

    def _forget(self, stream: int) -> None:
        super()._forget(stream)
        self._ids.pop(stream, None)
        self._received_in.pop(stream, None)
        for call in [call for call, its in self._stream_of.items() if its == stream]:
            del self._stream_of[call]

    # Reading

    def _on_data(self, stream: int, flags: int, size: int, now: int) -> None:
        super()._on_data(stream, flags, size, now)
        if stream in self._received_in:
            received = self._received_in[stream] + size
            if received >= _WINDOW_UPDATE_BYTES:
                self._out.append(frames.window_update(stream, received))
                received = 0
            self._received_in[stream] = received

    def _on_block(self, stream: int, flags: int, block: bytes, now: int) -> None:
        if flags & frames.END_STREAM:
            end = self._decoder.head(block)
            message = end.message or "the server ended the stream"
            self._end(stream, Outcome.REFUSED, end.grpc or end.http or 0, message)
        else:
            # The headers that begin a stream are not part of a response.
            self._decoder.head(block)

    def _on_response_data(self, stream: int, data: bytes, now: int) -> None:
        held = self._responses[stream]
        if held:
            data = held + data
        at = 0
        while len(data) - at >= _PREFIX:
            stop = at + _PREFIX + int.from_bytes(data[at + 1 : at + _PREFIX], "big")
            if stop > len(data):
                break
            self._on_response(stream, data[at + _PREFIX : stop], now)
            at = stop
        if stream in self._responses:
            self._responses[stream] = data[at:]

    def _on_response(self, stream: int, message: bytes, now: int) -> None:
        call = self._calls.get(stream)
        if call is None:
            return
        response = service_pb2.ModelStreamInferResponse.FromString(message)
        inference = response.infer_response
        if inference.id and inference.id != self._ids[stream]:
            return
        if response.error_message:
            self._complete(stream, Outcome.REFUSED, response.error_message, now)
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
            self._complete(stream, Outcome.WRONG if wrong else Outcome.OK, wrong, now)

    def _complete(self, stream: int, outcome: Outcome, error: str, now: int) -> None:
        """Complete a request; its stream stays open."""
        self._calls.pop(stream).finish(outcome, error, end=now)
        if self._going_away:
            self._reconnect_when_idle()
