"""The RPCs: what the server answers to each method of ``inference.GRPCInferenceService`` and the health service.

``GrpcService`` is the application behind every connection of the front end; it runs on the event loop
and calls nothing but the server's core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from conch.errors import ConchError, unavailable, unsupported
from conch.frontends.grpc.access import Access, HeaderForwarding
from conch.frontends.grpc.calls import LOGGER, UNREADABLE, Call, UnaryCall
from conch.frontends.grpc.http2.headers import Field
from conch.frontends.grpc.http2.streams import IGNORE, Http2Stream, StreamHandler
from conch.frontends.grpc.infer import InferCall
from conch.frontends.grpc.requests import RequestHead, parse_head
from conch.frontends.grpc.status import CallFault, Status, http_error
from conch.frontends.grpc.stream_infer import StreamInferCall
from conch.wire.grpc import control

if TYPE_CHECKING:
    from conch.server.core import Server

_SERVICE: Final = "/inference.GRPCInferenceService/"
_HEALTH: Final = "/grpc.health.v1.Health/"
#: Methods that ask whether the server is there.
_STATE: Final = {_SERVICE + "ServerLive", _SERVICE + "ServerReady"}
_STOPPING: Final = "GRPC server is shutting down and has stopped accepting new requests."


#: From a request's message to the response's, or to something that is awaited for it.
Answer = Callable[[Any], Message | Awaitable[Message]]


class Method(NamedTuple):
    """One RPC: who may call it, and the call that serves it."""

    access: Access
    open: Callable[[Http2Stream, RequestHead], Call]


class GrpcService:
    """Opens calls on streams.  ``forwarding`` and ``compression`` concern inference."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.forwarding = HeaderForwarding(server.settings.grpc_header_forward_pattern)
        self.compression = server.settings.grpc_infer_response_compression_level
        self.tasks: set[asyncio.Task[None]] = set()
        self._methods = {path: self._method(group, opener) for path, (group, opener) in self._table().items()}

    # What connections ask for

    def parse(self, fields: Sequence[Field]) -> RequestHead:
        return parse_head(fields)

    def open(self, stream: Http2Stream, head: RequestHead) -> StreamHandler:
        if head.http_status is not None:
            stream.finish(http_error(head.http_status))
            return IGNORE
        method = self._methods.get(head.path)
        if method is None:
            return self._refuse(stream, head, CallFault(Status.UNIMPLEMENTED, ""))
        refused = method.access.check(head)
        if refused is None and self.server.exiting:
            refused = unavailable("Server exiting" if head.path in _STATE else _STOPPING)
        if refused is not None:
            return self._refuse(stream, head, refused)
        return method.open(stream, head)

    def _refuse(self, stream: Http2Stream, head: RequestHead, error: ConchError | CallFault) -> StreamHandler:
        call = Call(stream, head, self.loop)
        call.fail(error)
        return call

    # The table

    def _method(self, group: str, opener: Callable[[Http2Stream, RequestHead], Call]) -> Method:
        return Method(Access(self.server.settings.grpc_restricted_protocol, group), opener)

    def _table(self) -> dict[str, tuple[str, Callable[[Http2Stream, RequestHead], Call]]]:
        """The group (as restrictions name it) and the call of every method."""
        unary = self._unary
        table = {
            "ServerLive": ("health", unary(pb.ServerLiveRequest, self._server_live)),
            "ServerReady": ("health", unary(pb.ServerReadyRequest, self._server_ready)),
            "ModelReady": ("health", unary(pb.ModelReadyRequest, self._model_ready)),
            "ServerMetadata": ("metadata", unary(pb.ServerMetadataRequest, self._server_metadata)),
            "ModelMetadata": ("metadata", unary(pb.ModelMetadataRequest, self._model_metadata)),
            "ModelInfer": ("inference", lambda stream, head: InferCall(stream, head, self)),
            "ModelStreamInfer": ("inference", lambda stream, head: StreamInferCall(stream, head, self)),
            "ModelConfig": ("model-config", unary(pb.ModelConfigRequest, self._model_config)),
            "ModelStatistics": ("statistics", unary(pb.ModelStatisticsRequest, self._model_statistics)),
            "RepositoryIndex": ("model-repository", unary(pb.RepositoryIndexRequest, self._repository_index)),
            "RepositoryModelLoad": ("model-repository", unary(pb.RepositoryModelLoadRequest, self._load)),
            "RepositoryModelUnload": ("model-repository", unary(pb.RepositoryModelUnloadRequest, self._unload)),
            "LogSettings": ("logging", unary(pb.LogSettingsRequest, self._log_settings)),
            "TraceSetting": ("trace", unary(pb.TraceSettingRequest, _without("tracing"))),
        }
        for kind in ("System", "Cuda"):
            for action in ("Status", "Register", "Unregister"):
                name = f"{kind}SharedMemory{action}"
                table[name] = ("shared-memory", unary(getattr(pb, f"{name}Request"), _without("shared memory")))
        paths = {_SERVICE + name: entry for name, entry in table.items()}
        paths[_HEALTH + "Check"] = ("health", unary(health_pb2.HealthCheckRequest, self._health_check))
        return paths

    def _unary(self, request_class: type[Message], answer: Answer) -> Callable[[Http2Stream, RequestHead], Call]:
        return lambda stream, head: ControlCall(stream, head, self, request_class, answer)

    # The answers

    def _server_live(self, request: pb.ServerLiveRequest) -> Any:
        return pb.ServerLiveResponse(live=self.server.live)

    def _server_ready(self, request: pb.ServerReadyRequest) -> Any:
        return pb.ServerReadyResponse(ready=self.server.ready)

    def _model_ready(self, request: pb.ModelReadyRequest) -> Any:
        ready = self.server.model_ready(request.name, control.read_version(request.version))
        return pb.ModelReadyResponse(ready=ready)

    def _server_metadata(self, request: pb.ServerMetadataRequest) -> Any:
        return pb.ServerMetadataResponse(**self.server.metadata())

    def _model_metadata(self, request: pb.ModelMetadataRequest) -> Any:
        return control.model_metadata(self.server.model_metadata(request.name, control.read_version(request.version)))

    def _model_config(self, request: pb.ModelConfigRequest) -> Any:
        return control.model_config(self.server.model(request.name, control.read_version(request.version)).config)

    def _model_statistics(self, request: pb.ModelStatisticsRequest) -> Any:
        return control.statistics(self.server.statistics(request.name, control.read_version(request.version)))

    def _repository_index(self, request: pb.RepositoryIndexRequest) -> Any:
        control.check_repository_name(request.repository_name)
        return control.index(self.server.index(request.ready))

    async def _load(self, request: pb.RepositoryModelLoadRequest) -> Any:
        config, files = control.read_load(request)
        await self.server.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: pb.RepositoryModelUnloadRequest) -> Any:
        await self.server.unload(request.model_name, control.read_unload(request))
        return pb.RepositoryModelUnloadResponse()

    def _log_settings(self, request: pb.LogSettingsRequest) -> Any:
        changes = control.read_log_settings(request)
        if changes:
            self.server.update_logs(changes)
        return control.log_settings(self.server.logs)

    def _health_check(self, request: health_pb2.HealthCheckRequest) -> Any:
        serving = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=serving.SERVING if self.server.ready else serving.NOT_SERVING)


def _without(what: str) -> Callable[[Any], Message]:
    def refuse(request: Any) -> Message:
        raise unsupported(f"this server does not have {what} yet")

    return refuse


class ControlCall(UnaryCall):
    """A unary call whose answer is one function of its request, at once or awaited.

    What was begun (a load) goes on when the client hangs up.
    """

    __slots__ = ("_answer", "_request_class", "_service")

    def __init__(
        self,
        stream: Http2Stream,
        head: RequestHead,
        service: GrpcService,
        request_class: type[Message],
        answer: Answer,
    ) -> None:
        super().__init__(stream, head, service.loop)
        self._service = service
        self._request_class = request_class
        self._answer = answer

    def run(self, message: bytes) -> None:
        try:
            request = self._request_class.FromString(message)
        except DecodeError:
            raise CallFault(Status.INTERNAL, UNREADABLE) from None
        answer = self._answer(request)
        if isinstance(answer, Message):
            self.answer([answer.SerializeToString()])
        else:
            task = asyncio.ensure_future(self._wait(answer))
            self._service.tasks.add(task)
            task.add_done_callback(self._service.tasks.discard)

    async def _wait(self, answer: Awaitable[Message]) -> None:
        try:
            self.answer([(await answer).SerializeToString()])
        except ConchError as error:
            self.fail(error)
        except Exception as error:
            LOGGER.exception("%s failed", self.head.path)
            self.fail(CallFault(Status.INTERNAL, f"{type(error).__name__}: {error}"))

    def on_cancel(self) -> None:
        pass
