"""Routes RPCs: from the path to the call that serves it, with access checks.

``GrpcService`` is the application of every connection; its table below is the whole gRPC surface
(``inference.GRPCInferenceService``, health and reflection). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from conch.core.errors import ConchError, unavailable
from conch.core.protocol import grpc_service as pb
from conch.core.protocol import health
from conch.core.tensors import Buffer
from conch.frontends.access_log import AccessRecord
from conch.frontends.api_keys import NO_KEYS, REFUSAL, ApiKeys
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.grpc.calls import Call, ServingContext, UnaryCall
from conch.frontends.grpc.control import ControlCall, ControlMethods, Respond
from conch.frontends.grpc.infer import InferCall
from conch.frontends.grpc.large import parse
from conch.frontends.grpc.reflection import VERSIONS, ReflectionCall
from conch.frontends.grpc.requests import RequestHead, check_trailers, parse_head
from conch.frontends.grpc.status import CallFault, Status, http_error
from conch.frontends.grpc.stream_infer import StreamInferCall
from conch.frontends.limits import ClientLimits
from conch.frontends.offloading.offloader import Offloader
from conch.http2 import IGNORE, MAX_HEADER_LIST, Field, Http2Stream, StreamHandler
from conch.machine import logs
from conch.options.triton_values import Restriction
from conch.server.core import InferenceServer
from conch.server.regions import ClientRegion, ClientRegions, CudaRegion, SystemRegion

_HEADER: Final = "triton-grpc-protocol-"


class Access:
    """Checks the calls of one group of RPCs (``inference``, ``health`` …)."""

    def __init__(self, restrictions: Iterable[Restriction], group: str, keys: ApiKeys) -> None:
        self._keys = keys if group != "health" else NO_KEYS
        self._required = [
            (_HEADER + restriction.header, restriction.value)
            for restriction in restrictions
            if group in restriction.apis
        ]

    def client(self, head: RequestHead) -> str:
        """Return the name of the API key of a call; empty if it has none, or none is required."""
        return self._keys.name_of((head.get("authorization") or "").encode()) if self._keys else ""

    def check(self, head: RequestHead) -> ConchError | CallFault | None:
        """Return the error that refuses a call with this head; None if it is allowed."""
        if self._keys and not self.client(head):
            return CallFault(Status.UNAUTHENTICATED, REFUSAL)
        for header, value in self._required:
            if not hmac.compare_digest((head.get(header.lower()) or "").encode(), value.encode()):
                return unavailable(f"This protocol is restricted, expecting header '{header}'")
        return None


#: The services with a known health: the server as a whole, and the inference service.
SERVICES: Final = ("", "inference.GRPCInferenceService")
#: Interval at which the readiness is checked while a client watches (s).
_PERIOD: Final = 0.25

_SERVING: Final = health.HealthCheckResponse.ServingStatus


class HealthWatchers:
    """The calls that watch the health; checks the server for all of them."""

    def __init__(self, server: InferenceServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._calls: set[WatchCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> int:
        return int(_SERVING.SERVING if self._server.ready else _SERVING.NOT_SERVING)

    def add(self, call: WatchCall) -> None:
        """Subscribe a call to changes of the health."""
        self._calls.add(call)
        if self._timer is None:
            self._timer = self._loop.call_later(_PERIOD, self._check)

    def remove(self, call: WatchCall) -> None:
        """Remove a call that has ended."""
        self._calls.discard(call)
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = self._loop.call_later(_PERIOD, self._check)
        exiting, status = self._server.exiting, self.status
        for call in list(self._calls):
            if call.service in SERVICES:
                call.tell(status)
            if exiting:
                # Otherwise the call would keep the server from stopping.
                call.abort(Status.UNAVAILABLE, "Server exiting")


class WatchCall(UnaryCall):
    """Sends the status of a service at once, and then each change."""

    __slots__ = ("_reported", "_watchers", "service")

    def __init__(
        self, stream: Http2Stream, head: RequestHead, context: ServingContext, watchers: HealthWatchers
    ) -> None:
        super().__init__(stream, head, context)
        self._watchers = watchers
        self._reported: int | None = None
        self.service = ""

    def run(self, message: Buffer) -> None:
        self.service = parse(health.HealthCheckRequest, message).service
        self.release(self.message_size)
        # The protocol allows an unknown service to appear later; here it never does.
        self.tell(self._watchers.status if self.service in SERVICES else _SERVING.SERVICE_UNKNOWN)
        self._watchers.add(self)

    def run_compressed(self, message: Buffer) -> None:
        raise CallFault(Status.RESOURCE_EXHAUSTED, "the message is too large")

    def tell(self, status: int) -> None:
        """Send a status unless it was the last one sent, or the client has not read the last one yet."""
        if status != self._reported and not self.unsent:
            self._reported = status
            self.send([health.HealthCheckResponse(status=status).SerializeToString()])

    def on_cancel(self) -> None:
        self._watchers.remove(self)


def region_methods(regions: ClientRegions) -> dict[str, tuple[type[Message], Respond]]:
    """Return the request class and the function of each method for shared memory."""

    def status(kind: type[ClientRegion], response: Any, request: Any) -> Any:
        shown = regions.status(kind, request.name)
        return response(regions={region["name"]: response.RegionStatus(**region) for region in shown})

    def unregister(kind: type[ClientRegion], response: Any, request: Any) -> Any:
        regions.require()
        regions.unregister(kind, request.name)
        return response()

    async def register_system(request: pb.SystemSharedMemoryRegisterRequest) -> Any:
        regions.require()
        await regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def register_cuda(request: pb.CudaSharedMemoryRegisterRequest) -> Any:
        regions.require()
        regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    methods: dict[str, Respond] = {
        "SystemSharedMemoryStatus": partial(status, SystemRegion, pb.SystemSharedMemoryStatusResponse),
        "SystemSharedMemoryRegister": register_system,
        "SystemSharedMemoryUnregister": partial(unregister, SystemRegion, pb.SystemSharedMemoryUnregisterResponse),
        "CudaSharedMemoryStatus": partial(status, CudaRegion, pb.CudaSharedMemoryStatusResponse),
        "CudaSharedMemoryRegister": register_cuda,
        "CudaSharedMemoryUnregister": partial(unregister, CudaRegion, pb.CudaSharedMemoryUnregisterResponse),
    }
    return {name: (getattr(pb, f"{name}Request"), respond) for name, respond in methods.items()}


_SERVICE: Final = "/inference.GRPCInferenceService/"
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
#: Methods that return the state of the server.
_STATE: Final = {_SERVICE + "ServerLive", _SERVICE + "ServerReady"}
_STOPPING: Final = "GRPC server is shutting down and has stopped accepting new requests."


class Method(NamedTuple):
    """An RPC: its access rules, and the call that serves it."""

    access: Access
    open: Callable[[Http2Stream, RequestHead], Call]


class GrpcService:
    """Opens a call on each stream."""

    def __init__(
        self,
        server: InferenceServer,
        loop: asyncio.AbstractEventLoop,
        offloader: Offloader,
        limits: ClientLimits,
        keys: ApiKeys = NO_KEYS,
    ) -> None:
        self._server = server
        self._lister = limits.lister
        forwarding = HeaderForwarding(server.settings.grpc_header_forward_pattern, "--grpc-header-forward-pattern")
        self._context = ServingContext(
            server,
            loop,
            limits.budget,
            forwarding,
            server.settings.grpc_infer_response_compression_level,
            server.settings.grpc_max_decompressed_size,
            offloader,
        )
        restrictions = server.settings.grpc_restricted_protocol
        self._methods = {
            path: Method(Access(restrictions, group, keys), opener) for path, (group, opener) in self._table().items()
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
            message = f"received metadata of {head.size} bytes, which is more than the limit of {MAX_HEADER_LIST}"
            return self._refuse(stream, head, CallFault(Status.RESOURCE_EXHAUSTED, message))
        method = self._methods.get(head.path)
        if method is None:
            return self._refuse(stream, head, CallFault(Status.UNIMPLEMENTED, ""))
        refused = method.access.check(head)
        if refused is None and self._server.exiting:
            refused = unavailable("Server exiting" if head.path in _STATE else _STOPPING)
        if refused is not None:
            return self._refuse(stream, head, refused)
        call = _recorded(method.open(stream, head), method.access.client(head))
        if self._server.tracing.on:
            call.began = monotonic_ns()
        return call

    def _refuse(self, stream: Http2Stream, head: RequestHead, error: ConchError | CallFault) -> StreamHandler:
        call = _recorded(Call(stream, head, self._context))
        call.fail(error)
        return call

    def _table(self) -> dict[str, tuple[str, Callable[[Http2Stream, RequestHead], Call]]]:
        """Return the restriction group and the call of every method."""
        context, control, unary = self._context, ControlMethods(self._server, self._lister), self._unary
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
        paths[_HEALTH + "Check"] = ("health", unary(health.HealthCheckRequest, control.health_check))
        watchers = HealthWatchers(self._server, context.loop)
        paths[_HEALTH + "Watch"] = ("health", lambda stream, head: WatchCall(stream, head, context, watchers))
        for version in VERSIONS:
            opener = partial(ReflectionCall, context=context, version=version)
            paths[_REFLECTION.format(version)] = ("metadata", opener)
        return paths

    def _unary(self, request_class: type[Message], respond: Respond) -> Callable[[Http2Stream, RequestHead], Call]:
        return lambda stream, head: ControlCall(stream, head, self._context, request_class, respond)


def _recorded(call: Call, client: str = "") -> Call:
    """Return ``call``, with an access log record if calls are logged; ``client`` is the name of its API key."""
    if logs.current().logs_calls and not call.finished:
        metadata = dict(call.head.metadata)
        call.record = AccessRecord(
            "gRPC",
            "",
            call.head.path,
            client=client,
            request_id=metadata.get("x-request-id", ""),
            traceparent=metadata.get("traceparent", ""),
        )
    return call
