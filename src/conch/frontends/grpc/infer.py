"""``ModelInfer``: one request, one response.

Opened by the service for every call; runs on the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from conch.errors import ConchError, internal, unsupported
from conch.frontends.grpc.calls import LOGGER, UNREADABLE, UnaryCall
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.grpc.messages import choose_encoding
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.inference import InferRequest, InferResponse
from conch.wire.grpc.control import read_version
from conch.wire.grpc.infer import GrpcOutputPlan, decode_infer, encode_infer

if TYPE_CHECKING:
    from conch.frontends.grpc.service import GrpcService
    from conch.server.model import Model


class InferCall(UnaryCall):
    """Ends when its request does: with the only response, or with an error."""

    __slots__ = ("_kept", "_model", "_plan", "_request", "_responses", "_service")

    _model: Model
    _plan: GrpcOutputPlan

    def __init__(self, stream: Http2Stream, head: RequestHead, service: GrpcService) -> None:
        super().__init__(stream, head, service.loop)
        self._service = service
        self._request: InferRequest | None = None
        self._kept: InferResponse | None = None
        self._responses = 0

    def run(self, message: bytes) -> None:
        parsed = parse_request(message)
        service = self._service
        model = service.server.model(parsed.model_name, read_version(parsed.model_version))
        if model.signature.decoupled:
            raise unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        self._model = model
        self._request, self._plan = decode_infer(parsed, self._respond, model.version)
        service.forwarding.add(self.head, self._request)
        model.infer(self._request)

    def on_cancel(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.cancel()

    def fail(self, error: ConchError | CallFault) -> None:
        self._request = None
        super().fail(error)

    def _respond(self, response: InferResponse) -> None:
        """The only response may be followed by an empty final one."""
        if response.final and self._kept is None:
            self._kept = response
        elif not response.empty:
            self._responses += 1
            self._kept = response
        # The request holds this call: without a cycle both are freed at once, not by the garbage collector.
        request = self._request
        if not response.final or request is None:
            return
        self._request = None
        try:
            answer = self._kept
            assert answer is not None
            if self._responses > 1:
                raise internal(f"expected a single response, got {self._responses}")
            if answer.error is not None:
                raise answer.error
            model, service = self._model, self._service
            batched = model.signature.max_batch_size > 0
            body = encode_infer(request, answer, self._plan, model.labels, batched)
            if service.compression != "none":
                self.encoding = choose_encoding(service.compression, self.head.accepted_encodings)
            self.answer(body)
        except ConchError as error:
            self.fail(error)
        except Exception as error:
            LOGGER.exception("a response of model '%s' cannot be sent", self._model.name)
            self.fail(CallFault(Status.INTERNAL, f"{type(error).__name__}: {error}"))


def parse_request(data: bytes) -> service_pb2.ModelInferRequest:
    try:
        return service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        raise CallFault(Status.INTERNAL, UNREADABLE) from None
