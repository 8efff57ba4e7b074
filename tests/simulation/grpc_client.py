"""A client of the gRPC front end on one connection: calls with one message, and streams of inference requests."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import hpack
from tritonclient.grpc import service_pb2

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.http2 import frames
from conch.wire.grpc.outgoing import CODES, decode_response, encode_request
from tests.simulation.connection import CONNECTION_LOST, ClientConnection, OnResponse

_MESSAGE = struct.Struct(">BI")
_PATH = "/inference.GRPCInferenceService/"


class _Call:
    """One HTTP/2 stream: its requests that have not ended, by id."""

    def __init__(self, streamed: bool) -> None:
        self.streamed = streamed
        self.waiting: dict[str, OnResponse] = {}
        self.data = b""
        self.status: int | None = None
        self.message = ""


class SimulatedGrpcClient(ClientConnection):
    """Sends ``stream`` requests in one ``ModelStreamInfer`` call, and each other request in a ``ModelInfer`` call."""

    def __init__(self, on_unasked: Callable[[str], None]) -> None:
        super().__init__()
        self._on_unasked = on_unasked
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._buffer = b""
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._open: int | None = None
        self._send(frames.PREFACE + frames.settings({frames.ENABLE_PUSH: 0}))

    def infer(
        self, request: InferRequest, key: str, on_response: OnResponse, *, streamed: bool, milliseconds: int = 0
    ) -> None:
        """Send a request; ``key`` identifies it, ``milliseconds`` is its timeout (0 for none)."""
        message = encode_request(request, request.model_name, -1, streamed=streamed)
        data = _MESSAGE.pack(0, len(message)) + message
        if streamed and self._open in self._calls:
            stream = self._open
            assert stream is not None
        else:
            stream = self._begin("ModelStreamInfer" if streamed else "ModelInfer", milliseconds)
            self._calls[stream] = _Call(streamed)
            if streamed:
                self._open = stream
        self._calls[stream].waiting[key] = on_response
        self._send(frames.frame(frames.DATA, 0 if streamed else frames.END_STREAM, stream, data))

    def cancel(self, key: str) -> bool:
        """Cancel a call with a single message; False if there is no such call."""
        for stream, call in list(self._calls.items()):
            if key in call.waiting and not call.streamed:
                del self._calls[stream]
                self._send(frames.rst_stream(stream, frames.Http2ErrorCode.CANCEL))
                return True
        return False

    def end_stream(self) -> None:
        """End the client's side of the open stream."""
        if self._open in self._calls and self._open is not None:
            self._send(frames.frame(frames.DATA, frames.END_STREAM, self._open))
        self._open = None

    def forget(self) -> None:
        self._calls.clear()

    def _begin(self, method: str, milliseconds: int) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", _PATH + method), (":authority", "a"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        if milliseconds:
            fields.append(("grpc-timeout", f"{milliseconds}m"))
        self._send(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, self._encoder.encode(fields)))
        return stream

    # Called by the transport

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _end(call, CONNECTION_LOST)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= frames.FRAME.size:
            word, flags, stream = frames.FRAME.unpack_from(self._buffer)
            end = frames.FRAME.size + (word >> 8)
            if len(self._buffer) < end:
                return
            payload, self._buffer = self._buffer[frames.FRAME.size : end], self._buffer[end:]
            self._frame(word & 0xFF, flags, stream, payload)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        call = self._calls.get(stream)
        match kind:
            case frames.SETTINGS if not flags & frames.ACK:
                self._send(frames.frame(frames.SETTINGS, frames.ACK, 0))
            case frames.PING if not flags & frames.ACK:
                self._send(frames.frame(frames.PING, frames.ACK, 0, payload))
            case frames.DATA:
                self._send(frames.window_update(0, max(len(payload), 1)))
                if call is not None:
                    call.data += payload
                    self._messages(call)
            case frames.HEADERS:
                fields = dict(self._decoder.decode(payload))
                if call is not None and "grpc-status" in fields:
                    call.status, call.message = int(fields["grpc-status"]), fields.get("grpc-message", "")
            case frames.RST_STREAM if call is not None:
                self._end(stream, ConchError("the server reset the stream", Code.UNAVAILABLE))
                return
            case frames.GOAWAY:
                self._open = None
        if call is not None and kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
            error = None
            if call.status:
                error = ConchError(call.message, CODES.get(call.status, Code.UNKNOWN))
            self._end(stream, error)

    def _messages(self, call: _Call) -> None:
        while len(call.data) >= _MESSAGE.size:
            _, size = _MESSAGE.unpack_from(call.data)
            if len(call.data) < _MESSAGE.size + size:
                return
            data = call.data[_MESSAGE.size : _MESSAGE.size + size]
            call.data = call.data[_MESSAGE.size + size :]
            if call.streamed:
                self._streamed(call, service_pb2.ModelStreamInferResponse.FromString(data))
            else:
                response = decode_response(service_pb2.ModelInferResponse.FromString(data))
                (on_response,) = call.waiting.values()
                call.waiting.clear()
                response.final = True
                on_response(response)

    def _streamed(self, call: _Call, message: Any) -> None:
        id = message.infer_response.id
        on_response = call.waiting.get(id)
        if on_response is None:
            self._on_unasked(f"a message on a stream for '{id}', which is not waiting: {message.error_message}")
            return
        if message.error_message:
            del call.waiting[id]
            on_response(InferResponse(error=ConchError(message.error_message, Code.INTERNAL)))
            return
        response = decode_response(message.infer_response)
        if response.final:
            del call.waiting[id]
        on_response(response)

    def _end(self, stream: int, error: ConchError | None) -> None:
        call = self._calls.pop(stream)
        if error is None and call.waiting:
            error = ConchError("the call ended without a response", Code.UNKNOWN)
        if error is not None:
            _end(call, error)


def _end(call: _Call, error: ConchError) -> None:
    for on_response in list(call.waiting.values()):
        on_response(InferResponse(error=error))
