"""gRPC transport to another server; messages are sent as bytes, so that tensors are copied only once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from conch.client.grpc import END_SECONDS, STREAM_METADATA, call_error, channel_credentials
from conch.client.transport import ConnectionFailedError, LostError
from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.protocol import grpc_service
from conch.server.execution.remote.http_calls import RemoteModel
from conch.wire.grpc.outgoing import ANY_SIZE, SERVICE_PATH, decode_response, encode_request

#: Timeout for a server to end a stream when the model is unloaded (s); otherwise END_SECONDS.
UNLOAD_END_SECONDS: Final = 1.0
#: Maximum number of streams that have had their final response but not ended; the oldest are cancelled.
MOST_ENDING: Final = 1000
#: Number of calls from which health checks use their own connection: proxies often allow 100 or 128 streams on
#: a connection, conch allows 1024.
MANY_CALLS: Final = 50
#: How long gRPC may take to report that a connection broke, after the failure of its calls (s). Errors UNAVAILABLE of
#: the server itself wait as long, because they look the same.
BREAK_SECONDS: Final = 0.02
#: Messages for a proxy's refusals; KServe servers do not return these statuses.
_REFUSALS: Final = {
    grpc.StatusCode.UNAUTHENTICATED: "it requires other credentials (UNAUTHENTICATED; 'authorization_env' names them)",
    grpc.StatusCode.PERMISSION_DENIED: "it forbids the request (PERMISSION_DENIED)",
}
_READY: Final = grpc.ChannelConnectivity.READY


class RemoteGrpc:
    """A channel to one server; see :class:`conch.server.execution.remote.executor.RemoteTransport`."""

    def __init__(self, url: RemoteUrl, model: RemoteModel) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        self._url = url
        self._model = model
        self._channel = self._open()
        #: Separate channel for health checks while many calls are in flight.
        self._check_channel: Any = None
        self._calls = 0
        self._metadata = tuple(model.headers.items())
        self._infer: Any = self._channel.unary_unary(f"{SERVICE_PATH}ModelInfer")
        self._stream: Any = self._channel.stream_stream(f"{SERVICE_PATH}ModelStreamInfer")
        self._loop = asyncio.get_running_loop()
        #: Completed when the connection breaks; then replaced.
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._watching = self._loop.create_task(self._watch())
        self._ending: dict[asyncio.Task[None], None] = {}

    def _open(self) -> Any:
        model, url = self._model, self._url
        options = (
            *ANY_SIZE,
            ("grpc.use_local_subchannel_pool", 1),  # the channel state then is that of one connection
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", int(model.connect_timeout * 1000)),
            ("grpc.max_reconnect_backoff_ms", 1000),
        )
        if not url.is_encrypted:
            return grpc.aio.insecure_channel(url.address, options)
        return grpc.aio.secure_channel(url.address, channel_credentials(model.tls), options)

    async def check(self) -> None:
        request = grpc_service.ModelReadyRequest(name=self._model.name, version=self._version)
        seconds = self._model.connect_timeout
        response = grpc_service.ModelReadyResponse.FromString(await self._call("ModelReady", request, seconds))
        if not response.ready:
            metadata = grpc_service.ModelMetadataRequest(name=self._model.name, version=self._version)
            await self._call("ModelMetadata", metadata, seconds)  # raises if the model does not exist
            raise unavailable(f"model '{self._model.name}' is not ready there")

    async def config(self) -> ModelConfig:
        request = grpc_service.ModelConfigRequest(name=self._model.name, version=self._version)
        return grpc_service.ModelConfigResponse.FromString(await self._call("ModelConfig", request, None)).config

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        message = encode_request(request, self._model.name, self._model.version, streamed=self._model.decoupled)
        self._calls += 1
        broken = self._broken
        try:
            if self._model.decoupled:
                await self._infer_stream(message, seconds, deliver)
                return
            message_bytes = await self._infer(message, timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._error(error, self._channel, broken) from None
        finally:
            self._calls -= 1
        deliver(_decoded(message_bytes))

    async def close(self) -> None:
        self._watching.cancel()
        if self._ending:
            await asyncio.wait(list(self._ending), timeout=UNLOAD_END_SECONDS)
        await self._channel.close()
        if self._check_channel is not None:
            await self._check_channel.close()

    @property
    def _version(self) -> str:
        return "" if self._model.version < 0 else str(self._model.version)

    async def _infer_stream(
        self, message: bytes, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        async def messages() -> AsyncIterator[bytes]:
            yield message

        metadata = (*self._metadata, *STREAM_METADATA)
        call = self._stream(messages(), timeout=seconds, metadata=metadata)
        is_complete = False
        try:
            async for data in call:
                streamed = grpc_service.ModelStreamInferResponse.FromString(data)
                if streamed.error_message:
                    is_complete = True
                    raise ConchError(streamed.error_message, Code.UNKNOWN)  # streams have no error codes in Triton
                response = decode_response(streamed.infer_response)
                is_complete = response.final
                deliver(response)
                if is_complete:
                    return
        finally:
            if is_complete:
                self._let_end(call)
            else:
                call.cancel()  # no effect on a call that has ended
        deliver(InferResponse())

    def _let_end(self, call: Any) -> None:
        """Wait in the background for the server to end a completed stream: Triton crashes if it is cancelled then."""
        ending = self._loop.create_task(_end_of(call))
        self._ending[ending] = None
        ending.add_done_callback(lambda _: self._ending.pop(ending, None))
        if len(self._ending) > MOST_ENDING:
            next(iter(self._ending)).cancel()

    async def _call(self, method: str, request: Any, seconds: float | None) -> bytes:
        """Call a method about the model other than inference. Raises errors with messages for the operator."""
        channel = self._channel
        if self._calls + len(self._ending) >= MANY_CALLS:
            channel = self._check_channel = self._check_channel or self._open()
        call = channel.unary_unary(f"{SERVICE_PATH}{method}")
        broken = self._broken
        try:
            response: bytes = await call(request.SerializeToString(), timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            status = error.code()
            if status is grpc.StatusCode.UNIMPLEMENTED:
                raise unavailable("it is not a server for this protocol (unknown method)") from None
            if status is grpc.StatusCode.NOT_FOUND:
                raise unavailable(f"it has no model '{self._model.name}' ({error.details()})") from None
            try:
                raise await self._error(error, channel, broken)
            except TimeoutError:
                raise unavailable(f"no response within {seconds:g} s" if seconds else "no response") from None
        return response

    async def _error(self, error: Any, channel: Any, broken: asyncio.Future[None]) -> Exception:
        """Return the error of a failed call; ``broken`` is the future of the connection when the call started."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError()
        if error.code() in _REFUSALS:
            return unavailable(_REFUSALS[error.code()])
        failure = call_error(error, self._url.host)
        if type(failure) is not ConnectionFailedError:
            return failure
        if channel is self._channel and channel.get_state() is _READY:
            await asyncio.wait([broken], timeout=BREAK_SECONDS)
        if broken.done() or channel.get_state() is not _READY:
            return LostError(f"the connection broke ({failure.cause})")
        return unavailable(failure.cause)

    async def _watch(self) -> None:
        """Call ``on_broken`` when the connection breaks."""
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.UsageError):
            while True:
                state = self._channel.get_state()
                await self._channel.wait_for_state_change(state)
                if state is _READY:
                    self._broken.set_result(None)
                    self._broken = self._loop.create_future()
                    self.on_broken()


async def _end_of(call: Any) -> None:
    """Read a stream until it ends; cancel it after a timeout."""
    try:
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(END_SECONDS):
                async for _ in call:
                    pass
    finally:
        call.cancel()  # no effect on a call that has ended


def _decoded(data: bytes) -> InferResponse:
    try:
        response = decode_response(grpc_service.ModelInferResponse.FromString(data))
    except ConchError:
        raise
    except Exception as error:  # protobuf's error for bytes that are not a message
        raise internal(f"the response is not a message of the protocol: {error}") from None
    response.final = True
    return response
