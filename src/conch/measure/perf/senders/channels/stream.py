"""An HTTP/2 channel with one ``ModelStreamInfer`` call per caller, which stays open from request to request.

Responses are matched to requests by the ids that this channel assigns; later responses to a failed request are ignored.
Runs on the event loop of a sending process.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Final

from tritonclient.grpc import service_pb2

from conch.http2 import frames
from conch.measure.perf.requests.encoding import ID_SIZE
from conch.measure.perf.senders.calls import Judge, TimedCall
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.grpc import SHARED_BY, GrpcChannel
from conch.measure.perf.senders.channels.rpc import Rpc, finish
from conch.measure.perf.senders.records import Outcome

_PREFIX: Final = 5
#: Number of received bytes in a stream after which its window is updated.
_TOLD: Final = frames.MAX_WINDOW // 2


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
            if received >= _TOLD:
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
                wrong = self._judge(call.number, inference.SerializeToString())
            self._complete(stream, Outcome.WRONG if wrong else Outcome.OK, wrong, now)

    def _complete(self, stream: int, outcome: Outcome, error: str, now: int) -> None:
        """Complete a request; its stream stays open."""
        finish(self._calls.pop(stream), outcome, 0, error, now)
        if self._going_away:
            self._reconnect_when_idle()
