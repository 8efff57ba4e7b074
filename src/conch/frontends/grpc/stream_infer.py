"""``ModelStreamInfer``: any number of requests on one stream, run concurrently.

Opened by the service for every stream; runs on the event loop.  A request that fails does not end
the stream, unless its execution failed and the client asks for that (metadata
``triton_grpc_error: true``).  Requests of models that are not decoupled are answered in their
order, each by one response; responses of decoupled models are sent as they come.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from conch.errors import ConchError, internal
from conch.frontends.grpc.calls import LOGGER, Call
from conch.frontends.grpc.http2.frames import Http2ErrorCode
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.grpc.infer import parse_request
from conch.frontends.grpc.messages import choose_encoding
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.inference import InferRequest, InferResponse
from conch.tensors import Buffer
from conch.wire.grpc.control import read_version
from conch.wire.grpc.infer import (
    GrpcOutputPlan,
    decode_infer,
    encode_empty_final,
    encode_execution_error,
    encode_infer,
    encode_stream_error,
    encode_stream_response,
)

if TYPE_CHECKING:
    from conch.frontends.grpc.service import GrpcService
    from conch.server.model import Model

#: Bytes of responses that wait, for a slow client or for their turn, before the client's next requests do, too.
PAUSE_AT: Final = 16 << 20
#: Bytes of responses that wait before the client is given up.
GIVE_UP_AT: Final = 512 << 20


class StreamInferCall(Call):
    """``_running`` are the requests that have not ended; ``_turns`` the places of responses that keep an order.

    ``_early`` counts bytes of responses that are there before their turn.
    """

    __slots__ = ("_early", "_half_closed", "_running", "_service", "_turns", "strict")

    def __init__(self, stream: Http2Stream, head: RequestHead, service: GrpcService) -> None:
        self._service = service
        #: Whether an execution that fails ends the stream.
        self.strict = (head.get("triton_grpc_error") or "").lower() == "true"
        self._running: dict[int, InferRequest] = {}
        self._turns: deque[_Turn] = deque()
        self._early = 0
        self._half_closed = False
        super().__init__(stream, head, service.loop)
        self.encoding = choose_encoding(service.compression, head.accepted_encodings)

    # What the call tells

    def on_message(self, data: bytes) -> None:
        parsed = parse_request(data)
        try:
            model = self._service.server.model(parsed.model_name, read_version(parsed.model_version))
            exchange = _Exchange(self, model)
            request, exchange.plan = decode_infer(parsed, exchange.respond, model.version)
            exchange.request = request
            self._service.forwarding.add(self.head, request)
        except ConchError as error:
            self._refuse(error, parsed.id)
            return
        if not model.signature.decoupled:
            exchange.turn = _Turn()
            self._turns.append(exchange.turn)
        self._running[request.serial] = request
        try:
            model.infer(request)
        except ConchError as error:
            exchange.refuse(error)

    def on_half_close(self) -> None:
        self._half_closed = True
        self._finish_if_done()

    def on_cancel(self) -> None:
        running, self._running = self._running, {}
        for request in running.values():
            request.cancel()

    def fail(self, error: ConchError | CallFault) -> None:
        super().fail(error)
        self.on_cancel()

    def on_drained(self) -> None:
        if self.paused and not self._early:
            self.resume()

    # What exchanges ask for

    def deliver(self, turn: _Turn | None, message: list[Buffer]) -> None:
        """Send a response, or keep it until its turn."""
        if turn is None:
            self.send(message)
        else:
            turn.message = message
            turn.size = sum(map(len, message))
            self._early += turn.size
            while self._turns and (first := self._turns[0]).message is not None:
                self._turns.popleft()
                self._early -= first.size
                self.send(first.message)
        queued = self.stream.queued
        if queued > GIVE_UP_AT:
            self.cut_off(Status.RESOURCE_EXHAUSTED, "Responses are not read", Http2ErrorCode.ENHANCE_YOUR_CALM)
        elif queued + self._early > PAUSE_AT:
            self.paused = True
        elif not queued:
            self.on_drained()

    def ended(self, request: InferRequest) -> None:
        self._running.pop(request.serial, None)
        self._finish_if_done()

    def _refuse(self, error: ConchError, request_id: str) -> None:
        turn = _Turn()
        self._turns.append(turn)
        self.deliver(turn, encode_stream_error(error.message, request_id))

    def _finish_if_done(self) -> None:
        if self._half_closed and not self._running and not self.finished:
            self.finish()


class _Turn:
    """The place of a response in the order of a stream; ``message`` and its ``size`` once it is there."""

    __slots__ = ("message", "size")

    def __init__(self) -> None:
        self.message: list[Buffer] | None = None
        self.size = 0


class _Exchange:
    """One request of a stream and its responses."""

    __slots__ = ("_call", "_model", "_only", "_responses", "plan", "request", "turn")

    request: InferRequest
    plan: GrpcOutputPlan

    def __init__(self, call: StreamInferCall, model: Model) -> None:
        self._call = call
        self._model = model
        self._only: InferResponse | None = None
        self._responses = 0
        self.turn: _Turn | None = None

    def respond(self, response: InferResponse) -> None:
        call = self._call
        if not call.finished:
            try:
                self._deliver(response)
            except Exception as error:
                LOGGER.exception("a response of model '%s' cannot be sent", self._model.name)
                call.fail(CallFault(Status.INTERNAL, f"{type(error).__name__}: {error}"))
        if response.final:
            self._end()

    def refuse(self, error: ConchError) -> None:
        """The request was not accepted."""
        self._call.deliver(self.turn, encode_stream_error(error.message, self.request.id))
        self._end()

    def _end(self) -> None:
        self._call.ended(self.request)
        # The request holds this exchange: without a cycle both are freed at once.
        del self.request

    def _deliver(self, response: InferResponse) -> None:
        if self.turn is not None:
            self._deliver_only(response)
        elif not response.empty or (response.final and self.plan.empty_final):
            self._send(response)

    def _deliver_only(self, response: InferResponse) -> None:
        """Exactly one response of a model that is not decoupled; an empty final one may follow it."""
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
            if response.empty and self.turn is None:
                message = encode_empty_final(self.request, self.plan)
            else:
                batched = model.signature.max_batch_size > 0
                body = encode_infer(self.request, response, self.plan, model.labels, batched)
                message = encode_stream_response(body, response.final)
        except ConchError as error:
            if call.strict:
                call.fail(error)
                return
            message = encode_execution_error(error.message, self.request, self.plan, response.final)
        call.deliver(self.turn, message)
