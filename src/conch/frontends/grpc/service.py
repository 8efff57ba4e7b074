"""From an RPC's path to the call that serves it, and who may call it.

``GrpcService`` is the application of every connection; its table below is the whole gRPC surface
(``inference.GRPCInferenceService``, health and reflection).  Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Final, NamedTuple

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from conch import logs
from conch.errors import ConchError, unavailable
from conch.frontends.access_log import AccessRecord
from conch.frontends.codec.pool import Codec
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.grpc.access import Access
from conch.frontends.grpc.calls import Call
from conch.frontends.grpc.context import ServingContext
from conch.frontends.grpc.control import ControlCall, ControlMethods, Respond
from conch.frontends.grpc.health import HealthWatchers, WatchCall
from conch.frontends.grpc.http2.headers import MAX_HEADER_LIST, Field
from conch.frontends.grpc.http2.streams import IGNORE, Http2Stream, StreamHandler
from conch.frontends.grpc.infer import InferCall
from conch.frontends.grpc.reflection import VERSIONS, ReflectionCall
from conch.frontends.grpc.regions import region_methods
from conch.frontends.grpc.requests import RequestHead, check_trailers, parse_head
from conch.frontends.grpc.status import CallFault, Status, http_error
from conch.frontends.grpc.stream_infer import StreamInferCall
from conch.frontends.slices import Slices
from conch.server.core import InferenceServer

_SERVICE: Final = "/inference.GRPCInferenceService/"
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
#: Methods that ask for the state of the server.
_STATE: Final = {_SERVICE + "ServerLive", _SERVICE + "ServerReady"}
_STOPPING: Final = "GRPC server is shutting down and has stopped accepting new requests."


class Method(NamedTuple):
    """One RPC: who may call it, and the call that serves it."""

    access: Access
    open: Callable[[Http2Stream, RequestHead], Call]


class GrpcService:
    """Opens a call on each stream."""

    def __init__(self, server: InferenceServer, loop: asyncio.AbstractEventLoop, codec: Codec, slices: Slices) -> None:
        self._server = server
        self._slices = slices
        forwarding = HeaderForwarding(server.settings.grpc_header_forward_pattern, "--grpc-header-forward-pattern")
        self._context = ServingContext(
            server,
            loop,
            forwarding,
            server.settings.grpc_infer_response_compression_level,
            server.settings.grpc_max_decompressed_size,
            codec,
        )
        restrictions = server.settings.grpc_restricted_protocol
        self._methods = {
            path: Method(Access(restrictions, group), opener) for path, (group, opener) in self._table().items()
        }

    def parse(self, fields: Sequence[Field]) -> RequestHead:
        return parse_head(fields)

    def check_trailers(self, fields: Sequence[Field]) -> None:
        check_trailers(fields)

    def open(self, stream: Http2Stream, head: RequestHead) -> StreamHandler:
        stream.content_left = head.content_length
        if head.http_status is not None:
            stream.finish(http_error(head.http_status))
            return IGNORE
        if head.size > MAX_HEADER_LIST:
            return self._refuse(stream, head, _too_much_metadata(head.size))
        method = self._methods.get(head.path)
        if method is None:
            return self._refuse(stream, head, CallFault(Status.UNIMPLEMENTED, ""))
        refused = method.access.check(head)
        if refused is None and self._server.exiting:
            refused = unavailable("Server exiting" if head.path in _STATE else _STOPPING)
        if refused is not None:
            return self._refuse(stream, head, refused)
        call = _recorded(method.open(stream, head))
        if self._server.tracing.on:
            call.began = monotonic_ns()
        return call

    def _refuse(self, stream: Http2Stream, head: RequestHead, error: ConchError | CallFault) -> StreamHandler:
        call = _recorded(Call(stream, head, self._context.loop))
        call.fail(error)
        return call

    def _table(self) -> dict[str, tuple[str, Callable[[Http2Stream, RequestHead], Call]]]:
        """The group (as restrictions name it) and the call of every method."""
        context, control, unary = self._context, ControlMethods(self._server, self._slices), self._unary
        table = {
            "ServerLive": ("health", unary(pb.ServerLiveRequest, control.server_live)),
            "ServerReady": ("health", unary(pb.ServerReadyRequest, control.server_ready)),
            "ModelReady": ("health", unary(pb.ModelReadyRequest, control.model_ready)),
            "ServerMetadata": ("metadata", unary(pb.ServerMetadataRequest, control.server_metadata)),
            "ModelMetadata": ("metadata", unary(pb.ModelMetadataRequest, control.model_metadata)),
            "ModelInfer": ("inference", lambda stream, head: InferCall(stream, head, context)),
            "ModelStreamInfer": ("inference", lambda stream, head: StreamInferCall(stream, head, context)),
            "ModelConfig": ("model-config", unary(pb.ModelConfigRequest, control.model_config)),
            "ModelStatistics": ("statistics", unary(pb.ModelStatisticsRequest, control.model_statistics)),
            "RepositoryIndex": ("model-repository", unary(pb.RepositoryIndexRequest, control.repository_index)),
            "RepositoryModelLoad": ("model-repository", unary(pb.RepositoryModelLoadRequest, control.load)),
            "RepositoryModelUnload": ("model-repository", unary(pb.RepositoryModelUnloadRequest, control.unload)),
            "LogSettings": ("logging", unary(pb.LogSettingsRequest, control.log_settings)),
            "TraceSetting": ("trace", unary(pb.TraceSettingRequest, control.trace_setting)),
        }
        for name, (request_class, respond) in region_methods(self._server.regions).items():
            table[name] = ("shared-memory", unary(request_class, respond))
        paths = {_SERVICE + name: entry for name, entry in table.items()}
        paths[_HEALTH + "Check"] = ("health", unary(health_pb2.HealthCheckRequest, control.health_check))
        watchers = HealthWatchers(self._server, context.loop)
        paths[_HEALTH + "Watch"] = ("health", lambda stream, head: WatchCall(stream, head, context.loop, watchers))
        for version in VERSIONS:
            paths[_REFLECTION.format(version)] = ("metadata", self._reflection(version))
        return paths

    def _reflection(self, version: str) -> Callable[[Http2Stream, RequestHead], Call]:
        return lambda stream, head: ReflectionCall(stream, head, self._context.loop, version)

    def _unary(self, request_class: type[Message], respond: Respond) -> Callable[[Http2Stream, RequestHead], Call]:
        return lambda stream, head: ControlCall(stream, head, self._context, request_class, respond)


def _too_much_metadata(size: int) -> CallFault:
    return CallFault(
        Status.RESOURCE_EXHAUSTED,
        f"received metadata of {size} bytes, which is more than the limit of {MAX_HEADER_LIST}",
    )


def _recorded(call: Call) -> Call:
    """``call``, of which the log says what becomes of it where it is verbose."""
    if logs.current().log_verbose_level:
        path = logs.shortened(call.head.path)
        logs.verbose(1, "gRPC request: %s", path)
        if not call.finished:
            call.record = AccessRecord("gRPC", path)
    return call
