"""``ModelStreamInfer``: any number of requests on one stream, run concurrently.

The service opens a ``StreamInferCall`` for every stream of this RPC; runs on the event loop. A failed request does not
end the stream unless the client requests that in the metadata: ``triton_grpc_error: true`` for failed executions,
``conch_grpc_error: true`` also for refused requests. Requests to models that are not decoupled get one response each,
in the order of the requests; responses of decoupled models are sent as they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from conch.core.errors import ConchError, internal
from conch.core.inference import InferRequest, InferResponse
from conch.core.protocol import grpc_service
from conch.core.tensors import Buffer
from conch.frontends.grpc.calls import Call, ServingContext, cancel_requests, log_skipped_response
from conch.frontends.grpc.large import DecodedInfer, decode_here, decode_large
from conch.frontends.grpc.messages import choose_encoding
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import Status
from conch.http2 import Http2ErrorCode, Http2Stream
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.wire.grpc.control import read_version
from conch.wire.grpc.infer import (
    ERRORS_WITH_CODES,
    GrpcOutputPlan,
    decode_infer,
    encode_empty_final,
    encode_execution_error,
    encode_infer,
    encode_stream_error,
    encode_stream_response,
)
from conch.wire.regions import NO_REGIONS

#: Bytes of responses that may wait, for a slow client or for earlier responses, before further requests wait too.
PAUSE_AT: Final = 16 << 20
#: Maximum number of concurrent requests of a stream; flow control holds further ones back at the client.
MAX_RUNNING: Final = 1024
#: Bytes of responses that may wait before the call is aborted.
GIVE_UP_AT: Final = 512 << 20


class StreamInferCall(Call):
    """Any number of requests and their responses.

    ``_running`` has the in-flight requests by serial number; ``_pending`` a slot for each response that must keep its
    order, first to last; ``_early_bytes`` counts the bytes of responses that wait for earlier ones.
    """

    __slots__ = ("_all_strict", "_context", "_early_bytes", "_half_closed", "_loads", "_pending", "_running", "strict")

    def __init__(self, stream: Http2Stream, head: RequestHead, context: ServingContext) -> None:
        self._context = context
        #: Whether a refused request ends the stream, and whether a failed execution does.
        self._all_strict = _is_set(head, ERRORS_WITH_CODES)
        self.strict = self._all_strict or _is_set(head, "triton_grpc_error")
        self._running: dict[int, InferRequest] = {}
        self._pending: deque[_ResponseSlot] = deque()
        #: Callbacks that stop waiting for the model of a request, by the request's slot.
        self._loads: dict[_ResponseSlot, Callable[[], None]] = {}
        self._early_bytes = 0
        self._half_closed = False
        super().__init__(stream, head, context)
        self.encoding = choose_encoding(context.compression, head.accepted_encodings)

    # Called by the base class

    def on_message(self, data: Buffer) -> None:
        decoded = decode_here(data)
        if decoded is not None:
            self._infer(decoded.message, decoded.raw)
        else:
            self.decode_later(decode_large(self._context.offloader, data, "identity", 0))

    def on_compressed_message(self, data: Buffer) -> None:
        self.decode_later(
            decode_large(self._context.offloader, data, self.head.encoding, self._context.max_decompressed)
        )

    def on_decoded(self, decoded: DecodedInfer) -> None:
        self.count_decoded(decoded.size)
        self._infer(decoded.message, decoded.raw, decoded.elements)

    def _infer(
        self,
        parsed: grpc_service.ModelInferRequest,
        raw: Sequence[Buffer] | None,
        elements: Sequence[int | None] = (),
        size: int = 0,
        slot: _ResponseSlot | None = None,
    ) -> None:
        """Run a request; ``size`` (of its message) and ``slot`` are given if it waited for its model."""
        server = self._context.server
        size = size or self.message_size
        streamed: _StreamedRequest | None = None
        try:
            model = server.model(parsed.model_name, read_version(parsed.model_version))
            streamed = _StreamedRequest(self, model, size)
            regions = server.regions.held_by(streamed.hold) if server.regions else NO_REGIONS
            request, streamed.plan = decode_infer(parsed, model.signature, streamed.on_response, raw, elements, regions)
            streamed.request = request
            self._context.forwarding.add(self.head.metadata, request)
        except LoadNeeded as needed:
            slot = slot or self._new_slot()
            self._loads[slot] = needed.then(partial(self._infer_loaded, parsed, raw, elements, size, slot))
            self._pause_if_full()
            return
        except ConchError as error:
            self.release(streamed.size if streamed is not None else size)
            self.refuse(slot or self._new_slot(), error, parsed.id)
            return
        if not model.signature.decoupled:
            streamed.slot = slot or self._new_slot()
        elif slot is not None:
            slot.message = []
            self._send_in_order()
        self._running[request.serial] = request
        self._pause_if_full()
        try:
            self.begin_trace(server.tracing, request)
            self.infer(self._context.offloader, model, request, streamed.refuse)
        except ConchError as error:
            streamed.refuse(error)

    def on_half_close(self) -> None:
        self._half_closed = True
        self._finish_if_done()

    def on_cancel(self) -> None:
        loads, self._loads = self._loads, {}
        for stop_waiting in loads.values():
            stop_waiting()
        running, self._running = self._running, {}
        cancel_requests("ModelStreamInferHandler", running.values())

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.on_cancel()

    def on_drained(self) -> None:
        if self.paused and not self._early_bytes and len(self._running) + len(self._loads) < MAX_RUNNING:
            self.resume()

    # Called by the requests

    def deliver(self, slot: _ResponseSlot | None, message: list[Buffer]) -> None:
        """Send a response; one with a slot waits until those before it have been sent."""
        if slot is None:
            self.send(message)
        else:
            slot.message = message
            slot.size = sum(map(len, message))
            self._early_bytes += slot.size
            self._send_in_order()
        unsent = self.unsent
        if unsent > GIVE_UP_AT or (unsent > PAUSE_AT and self._context.budget.overdrawn):
            self.abort(Status.RESOURCE_EXHAUSTED, "Responses are not read", Http2ErrorCode.ENHANCE_YOUR_CALM)
        elif unsent + self._early_bytes > PAUSE_AT:
            self.paused = True
        elif not unsent:
            self.on_drained()

    def refuse(self, slot: _ResponseSlot | None, error: ConchError, request_id: str) -> None:
        """Respond to a request that was not accepted."""
        if self._all_strict:
            self.fail(error)
        else:
            self.deliver(slot, encode_stream_error(error.public, request_id))

    def on_ended(self, request: InferRequest, size: int) -> None:
        """Release ``size`` bytes of the message of a request; called after its last response."""
        self._running.pop(request.serial, None)
        self.release(size)
        if self.paused and not self.unsent:
            self.on_drained()
        self._finish_if_done()

    def _pause_if_full(self) -> None:
        if len(self._running) + len(self._loads) >= MAX_RUNNING:
            self.paused = True

    def _send_in_order(self) -> None:
        """Send the responses that have no missing predecessor."""
        while self._pending and (first := self._pending[0]).message is not None:
            self._pending.popleft()
            self._early_bytes -= first.size
            if first.message:
                self.send(first.message)

    def _new_slot(self) -> _ResponseSlot:
        slot = _ResponseSlot()
        self._pending.append(slot)
        return slot

    def _infer_loaded(
        self,
        parsed: grpc_service.ModelInferRequest,
        raw: Sequence[Buffer] | None,
        elements: Sequence[int | None],
        size: int,
        slot: _ResponseSlot,
        load_error: ConchError | None,
    ) -> None:
        """Run a request whose model is loaded, or refuse it if the load has failed."""
        del self._loads[slot]
        if self.finished:
            return
        try:
            if load_error is None:
                self._infer(parsed, raw, elements, size, slot)
            else:
                self.release(size)
                self.refuse(slot, load_error, parsed.id)
        except Exception as error:
            self.fail(error)
        if self.paused and not self.unsent:
            self.on_drained()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._half_closed and not self._running and not self._loads and not self.finished:
            self.finish()


def _is_set(head: RequestHead, name: str) -> bool:
    """Whether a flag in the metadata of a call is set."""
    return (head.get(name) or "").lower() == "true"


class _ResponseSlot:
    """The position of a response in the order of a stream; ``message`` and its ``size`` are set when it arrives.

    An empty message is skipped: its decoupled model does not respond in order.
    """

    __slots__ = ("message", "size")

    def __init__(self) -> None:
        self.message: list[Buffer] | None = None
        self.size = 0


class _StreamedRequest:
    """A request of a stream and its responses; ``size`` is the number of bytes that it holds."""

    __slots__ = ("_call", "_model", "_only", "_responses", "plan", "request", "size", "slot")

    request: InferRequest
    plan: GrpcOutputPlan

    def __init__(self, call: StreamInferCall, model: Model, size: int) -> None:
        self._call = call
        self._model = model
        self.size = size
        self._only: InferResponse | None = None
        self._responses = 0
        self.slot: _ResponseSlot | None = None

    def on_response(self, response: InferResponse) -> None:
        call = self._call
        if not call.finished:
            try:
                self._deliver(response)
            except Exception as error:
                call.fail(error)
        elif self.request.cancelled:
            log_skipped_response("ModelStreamInferHandler", self.request.serial, final=response.final)
        if response.final:
            self._end()

    def hold(self, size: int) -> None:
        """Count further bytes held for this request."""
        self.size += size
        self._call.hold(size)

    def refuse(self, error: ConchError) -> None:
        """Respond to a request that the model did not accept."""
        self._call.refuse(self.slot, error, self.request.id)
        self._end()

    def _end(self) -> None:
        self._call.on_ended(self.request, self.size)
        # The request refers to this object: breaking the cycle frees both at once.
        del self.request

    def _deliver(self, response: InferResponse) -> None:
        if self.slot is not None:
            self._deliver_only(response)
        elif not response.empty or (response.final and self.plan.empty_final):
            self._send(response)

    def _deliver_only(self, response: InferResponse) -> None:
        """Send exactly one response for a model that is not decoupled; an empty final one may follow it."""
        if response.final and self._only is None:
            self._only = response
        elif not response.empty:
            self._responses += 1
            self._only = response
        if response.final:
            assert self._only is not None
            if self._responses > 1:
                self._only = InferResponse(error=internal(f"expected a single response, got {self._responses}"))
            self._send(self._only)

    def _send(self, response: InferResponse) -> None:
        call, model = self._call, self._model
        try:
            if response.error is not None:
                raise response.error
            if self.request.shared is not None:
                self.request.shared.deliver(response)
            if response.empty and self.slot is None:
                message = encode_empty_final(self.request, self.plan)
            else:
                body = encode_infer(self.request, response, self.plan, model.labels)
                message = encode_stream_response(body, response.final)
        except ConchError as error:
            if call.strict:
                call.fail(error)
                return
            message = encode_execution_error(error.public, self.request, self.plan, response.final)
        call.deliver(self.slot, message)
