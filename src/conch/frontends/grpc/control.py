"""RPCs other than inference: health, metadata, configuration, repository, statistics, logging and tracing.

The service calls them on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from conch.core.protocol import grpc_service as pb
from conch.core.protocol import health
from conch.core.tensors import Buffer
from conch.frontends.grpc.calls import ServingContext, UnaryCall
from conch.frontends.grpc.large import MAX_HERE, decode_control, parse
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.frontends.loop_budget import YieldingLister
from conch.http2 import Http2Stream
from conch.server.core import InferenceServer
from conch.server.models.on_demand import LoadNeeded
from conch.wire.grpc import control

#: Converts a request message to a response message, or an awaitable of it; its errors end the call.
Respond = Callable[[Any], Message | Awaitable[Message]]


class ControlMethods:
    """The methods; each returns the response message for a request message, or raises ``ConchError``."""

    def __init__(self, server: InferenceServer, lister: YieldingLister) -> None:
        self._server = server
        self._lister = lister

    def server_live(self, request: pb.ServerLiveRequest) -> Any:
        return pb.ServerLiveResponse(live=self._server.live)

    def server_ready(self, request: pb.ServerReadyRequest) -> Any:
        return pb.ServerReadyResponse(ready=self._server.ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> Any:
        ready = self._server.model_ready(request.name, control.read_version(request.version))
        return pb.ModelReadyResponse(ready=ready)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> Any:
        metadata = self._server.metadata()
        return pb.ServerMetadataResponse(**{name: metadata[name] for name in ("name", "version", "extensions")})

    def model_metadata(self, request: pb.ModelMetadataRequest) -> Any:
        metadata = self._server.model_metadata(request.name, control.read_version(request.version))
        return pb.ModelMetadataResponse(**metadata)

    def model_config(self, request: pb.ModelConfigRequest) -> Any:
        model = self._server.model(request.name, control.read_version(request.version))
        return pb.ModelConfigResponse(config=model.shown_config)

    async def model_statistics(self, request: pb.ModelStatisticsRequest) -> Any:
        models = self._server.counters(request.name, control.read_version(request.version))
        entries = await self._lister.all(control.model_statistics(model.snapshot()) for model in models)
        return pb.ModelStatisticsResponse(model_stats=entries)

    async def repository_index(self, request: pb.RepositoryIndexRequest) -> Any:
        control.check_repository_name(request.repository_name)
        return pb.RepositoryIndexResponse(models=await self._lister.one(self._server.public_index(request.ready)))

    async def load(self, request: pb.RepositoryModelLoadRequest) -> Any:
        parameters = control.read_load(request)
        if parameters.lora_name:
            self._server.require_explicit_control()
            name, path = parameters.lora_name, parameters.lora_path
            await self._server.load_adapter(name, path, request.model_name, in_place=True)
        else:
            await self._server.load(request.model_name, parameters.config, parameters.files)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> Any:
        dependents, adapter = control.read_unload(request)
        if adapter:
            self._server.require_explicit_control()
            await self._server.unload_adapter(adapter, request.model_name)
        else:
            await self._server.unload(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()

    def log_settings(self, request: pb.LogSettingsRequest) -> Any:
        changes = control.read_log_settings(request)
        if changes:
            self._server.update_logs(changes)
        return control.log_settings(self._server.logs)

    def trace_setting(self, request: pb.TraceSettingRequest) -> Any:
        self._server.check_traced(request.model_name)
        changes = control.read_trace_setting(request)
        if changes:
            self._server.tracing.update(request.model_name, changes)
        return control.trace_setting(self._server.tracing.shown(request.model_name))

    def health_check(self, request: health.HealthCheckRequest) -> Any:
        serving = health.HealthCheckResponse.ServingStatus
        return health.HealthCheckResponse(status=serving.SERVING if self._server.ready else serving.NOT_SERVING)


class ControlCall(UnaryCall):
    """A unary call whose response comes from one function, which may be asynchronous.

    A load that has started continues if the client disconnects.
    """

    __slots__ = ("_context", "_request_class", "_respond")

    def __init__(
        self,
        stream: Http2Stream,
        head: RequestHead,
        context: ServingContext,
        request_class: type[Message],
        respond: Respond,
    ) -> None:
        super().__init__(stream, head, context)
        self._context = context
        self._request_class = request_class
        self._respond = respond

    def run(self, message: Buffer) -> None:
        if len(message) <= MAX_HERE:
            self.on_decoded(parse(self._request_class, message))
        elif self._request_class is pb.RepositoryModelLoadRequest:
            self.decode_later(decode_control(self._request_class, message, "identity", 0))
        else:
            raise CallFault(
                Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({len(message)} vs. {MAX_HERE})"
            )

    def run_compressed(self, message: Buffer) -> None:
        limit = self._context.max_decompressed
        self.decode_later(decode_control(self._request_class, message, self.head.encoding, limit))

    def on_decoded(self, request: Message) -> None:
        try:
            response = self._respond(request)
        except LoadNeeded as needed:
            self.wait_for(needed, partial(self.on_decoded, request))
            return
        if isinstance(response, Message):
            self.respond([response.SerializeToString()])
        else:
            task = asyncio.ensure_future(self._respond_later(response))
            self._context.tasks.add(task)
            task.add_done_callback(self._context.tasks.discard)

    async def _respond_later(self, response: Awaitable[Message]) -> None:
        try:
            self.respond([(await response).SerializeToString()])
        except Exception as error:
            self.fail(error)
