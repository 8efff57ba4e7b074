"""conch with its gRPC port served by ``grpc.aio`` instead of conch's own HTTP/2.

    python -m benchmarks.peers.grpc_aio serve --model-repository=...

Has the calls that clients of models use. Messages are decoded and encoded by the same code as in conch's front end,
but all of them on the event loop: none is offloaded, and nothing limits clients but gRPC's own options.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any, Final

import grpc
import grpc.aio

from benchmarks.peers.padding import replace
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.core.protocol import grpc_service as pb
from conch.frontends.api_keys import ApiKeys
from conch.frontends.grpc.control import ControlMethods
from conch.frontends.limits import ClientLimits
from conch.frontends.offloading.offloader import Offloader
from conch.options.settings import Settings
from conch.server.core import InferenceServer
from conch.wire.grpc.control import read_version
from conch.wire.grpc.infer import (
    GrpcOutputPlan,
    decode_infer,
    encode_infer,
    encode_stream_error,
    encode_stream_response,
)

_SERVICE: Final = "inference.GRPCInferenceService"
#: conch's own limit of a message (bytes).
_MAX_MESSAGE: Final = 2**31 - 1

_Context = grpc.aio.ServicerContext[Any, Any]


class AioFrontend:
    """Has the interface of :class:`conch.frontends.grpc.server.GrpcFrontend`, as far as an application uses it."""

    def __init__(
        self,
        server: InferenceServer,
        settings: Settings,
        limits: ClientLimits,
        offloader: Offloader,
        keys: ApiKeys,
    ) -> None:
        self._core = server
        self._control = ControlMethods(server, limits.lister)
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        control = self._control
        calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "ServerLive": (pb.ServerLiveRequest, control.server_live),
            "ServerReady": (pb.ServerReadyRequest, control.server_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, control.server_metadata),
            "ModelReady": (pb.ModelReadyRequest, control.model_ready),
            "ModelMetadata": (pb.ModelMetadataRequest, control.model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, control.model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, control.model_statistics),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _unary(respond), request.FromString, lambda message: message.SerializeToString()
            )
            for name, (request, respond) in calls.items()
        }
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer, pb.ModelInferRequest.FromString)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream_infer, pb.ModelInferRequest.FromString
        )
        self._server = server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", _MAX_MESSAGE), ("grpc.max_send_message_length", _MAX_MESSAGE)]
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        return host, bound

    async def stop(self, grace_seconds: float) -> None:
        assert self._server is not None
        await self._server.stop(grace_seconds)

    async def _infer(self, message: pb.ModelInferRequest, context: _Context) -> bytes:
        responses: asyncio.Queue[bytes | ConchError] = asyncio.Queue()
        self._start(message, lambda body, final: responses.put_nowait(b"".join(body)), responses.put_nowait)
        response = await responses.get()
        if isinstance(response, ConchError):
            await context.abort(_status(response.code), response.public)
        return response

    async def _stream_infer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: _Context
    ) -> AsyncIterator[bytes]:
        responses: asyncio.Queue[bytes | None] = asyncio.Queue()
        running = 1  # the reader

        def end() -> None:
            nonlocal running
            running -= 1
            if not running:
                responses.put_nowait(None)

        def respond(body: list[Any], final: bool) -> None:
            responses.put_nowait(b"".join(encode_stream_response(body, final)))
            if final:
                end()

        def refuse(error: ConchError) -> None:
            responses.put_nowait(b"".join(encode_stream_error(error.public, "")))
            end()

        async def read() -> None:
            nonlocal running
            async for message in messages:
                running += 1
                self._start(message, respond, refuse)
            end()

        reader = asyncio.ensure_future(read())
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    def _start(
        self,
        message: pb.ModelInferRequest,
        respond: Callable[[list[Any], bool], None],
        refuse: Callable[[ConchError], None],
    ) -> None:
        """Run a request; calls ``respond`` with the parts of each response, or ``refuse``."""
        request: InferRequest
        plan: GrpcOutputPlan

        def on_response(response: InferResponse) -> None:
            try:
                if response.error is not None:
                    raise response.error
                body = encode_infer(request, response, plan, model.labels)
            except ConchError as error:
                refuse(error)
            else:
                respond(body, response.final)

        try:
            model = self._core.model(message.model_name, read_version(message.model_version))
            request, plan = decode_infer(message, model.signature, on_response)
            model.infer(request)
        except ConchError as error:
            refuse(error)


def _unary(respond: Callable[[Any], Any]) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def call(message: Any, context: _Context) -> Any:
        try:
            response = respond(message)
            return await response if isawaitable(response) else response
        except ConchError as error:
            await context.abort(_status(error.code), error.public)

    return call


def _status(code: Code) -> grpc.StatusCode:
    return {
        Code.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
        Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    }.get(code, grpc.StatusCode.INTERNAL)


def main() -> None:
    from conch.cli import main
    from conch.library import app

    replace(app, "GrpcFrontend", AioFrontend)
    main()


if __name__ == "__main__":
    main()
