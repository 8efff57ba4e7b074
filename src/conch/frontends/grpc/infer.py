"""``ModelInfer``: one request, one response.

The service opens an ``InferCall`` for every stream of this RPC; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from conch.core.errors import internal, unsupported
from conch.core.inference import InferRequest, InferResponse
from conch.core.protocol import grpc_service
from conch.core.tensors import Buffer
from conch.frontends.grpc.calls import (
    ServingContext,
    UnaryCall,
    cancel_requests,
    log_early_cancellation,
    log_skipped_response,
)
from conch.frontends.grpc.large import DecodedInfer, decode_here, decode_large
from conch.frontends.grpc.messages import choose_encoding
from conch.frontends.grpc.requests import RequestHead
from conch.http2 import Http2Stream
from conch.server.execution.caching import MOST_MESSAGE_BYTES
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.wire.grpc.control import read_version
from conch.wire.grpc.infer import GrpcOutputPlan, decode_infer, encode_infer
from conch.wire.regions import NO_REGIONS


class InferCall(UnaryCall):
    """A call that ends with its request: with the only response, or with an error."""

    __slots__ = ("_cancelled", "_context", "_kept", "_message", "_model", "_plan", "_request", "_responses")

    _model: Model
    _plan: GrpcOutputPlan

    def __init__(self, stream: Http2Stream, head: RequestHead, context: ServingContext) -> None:
        #: A call without any time fails while it is created.
        self._request: InferRequest | None = None
        super().__init__(stream, head, context)
        self._context = context
        #: The serial number of the cancelled request; 0 if there is none.
        self._cancelled = 0
        self._kept: InferResponse | None = None
        #: The complete message of the client, for a model whose repeated messages are cached.
        self._message: bytes | None = None
        self._responses = 0

    def run(self, message: Buffer) -> None:
        decoded = decode_here(message)
        if decoded is not None:
            self._infer(decoded.message, decoded.raw, message=message)
        else:
            self.decode_later(decode_large(self._context.offloader, message, "identity", 0))

    def run_compressed(self, message: Buffer) -> None:
        self.decode_later(
            decode_large(self._context.offloader, message, self.head.encoding, self._context.max_decompressed)
        )

    def on_decoded(self, decoded: DecodedInfer) -> None:
        self.count_decoded(decoded.size)
        self._infer(decoded.message, decoded.raw, decoded.elements)

    def _infer(
        self,
        parsed: grpc_service.ModelInferRequest,
        raw: Sequence[Buffer] | None,
        elements: Sequence[int | None] = (),
        message: Buffer = b"",
    ) -> None:
        context = self._context
        try:
            model = context.server.model(parsed.model_name, read_version(parsed.model_version))
        except LoadNeeded as needed:
            self.wait_for(needed, partial(self._infer, parsed, raw, elements))
            return
        if model.signature.decoupled:
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        self._model = model
        if model.cached_messages is not None and message and self._respond_from_cache(model, message):
            return
        regions = context.server.regions.held_by(self.hold) if context.server.regions else NO_REGIONS
        self._request, self._plan = decode_infer(parsed, model.signature, self._on_response, raw, elements, regions)
        context.forwarding.add(self.head.metadata, self._request)
        self.begin_trace(context.server.tracing, self._request)
        if self.record is not None:
            self.record.identify(self._request)
        self.infer(context.offloader, model, self._request, self.fail)

    def _respond_from_cache(self, model: Model, message: Buffer) -> bool:
        """Send the stored response to an identical message; False if the response cache no longer has it."""
        context = self._context
        if len(message) > MOST_MESSAGE_BYTES or context.forwarding.enabled or context.server.tracing.on:
            return False
        self._message = bytes(message)
        if b"shared_memory" in self._message:  # the message alone does not determine the request
            self._message = None
            return False
        cached = model.cached_response(self._message)
        if not isinstance(cached, list):
            return False
        self._send(cached)
        return True

    def _send(self, body: list[Buffer]) -> None:
        if self._context.compression != "none":
            self.encoding = choose_encoding(self._context.compression, self.head.accepted_encodings)
        self.respond(body)

    def on_cancel(self) -> None:
        super().on_cancel()
        request, self._request = self._request, None
        if request is not None:
            self._cancelled = request.serial
            cancel_requests("ModelInferHandler", [request])
        elif self._kept is None:
            log_early_cancellation("ModelInferHandler")

    def fail(self, error: Exception) -> None:
        request, self._request = self._request, None
        super().fail(error)
        if request is not None:
            request.cancel()

    def _on_response(self, response: InferResponse) -> None:
        """Keep the only response until the request completes; an empty final response may mark that separately."""
        if self._cancelled:
            log_skipped_response("ModelInferHandler", self._cancelled, final=response.final)
            return
        if response.final and self._kept is None:
            self._kept = response
        elif not response.empty:
            self._responses += 1
            self._kept = response
        # The request refers to this call: breaking the cycle frees both at once, without the garbage collector.
        request = self._request
        if not response.final or request is None:
            return
        self._request = None
        try:
            kept = self._kept
            assert kept is not None
            if self._responses > 1:
                raise internal(f"expected a single response, got {self._responses}")
            if kept.error is not None:
                raise kept.error
            model = self._model
            if request.shared is not None:
                request.shared.deliver(kept)
            body = encode_infer(request, kept, self._plan, model.labels)
            self._send(body)
            if self._message is not None and model.cached_messages is not None:
                model.cached_messages.keep(request, self._message, body, len(self._message) + sum(map(len, body)))
        except Exception as error:
            self.fail(error)
