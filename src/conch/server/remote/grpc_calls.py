"""Calls to another server over gRPC, with messages as bytes, so that tensors are copied once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2

from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.errors import Code, ConchError, internal, unavailable
from conch.inference import InferRequest, InferResponse
from conch.server.remote.transport import LostError, RemoteModel, UnreachedError
from conch.wire.grpc.outgoing import ANY_SIZE, CODES, SERVICE_PATH, decode_response, encode_request
from conch.wire.grpc.parameters import ERRORS_WITH_CODES

#: How long a server may take to end a stream that has been answered (s), and how long when the model is unloaded.
_END_SECONDS: Final = 5.0
_LAST_END_SECONDS: Final = 1.0
#: How many streams may be answered and not ended; of more, the oldest are cancelled.
_MOST_ENDING: Final = 1000
#: So many calls may be all that a connection has room for: proxies often allow 100 or 128, a conch 1024.
_MANY: Final = 50
#: How gRPC begins the message of a call for which there was no connection.
_NO_CONNECTION: Final = "failed to connect to all addresses"
#: ... and of one whose host has no address; before and since 1.75.
_NO_ADDRESS: Final = ("DNS resolution failed", "errors resolving ")
#: What stands before the cause: a status, and the address, which is known.
_BEFORE_CAUSE: Final = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?(?:Failed to connect to remote host: )?")
#: How BoringSSL, and gRPC itself, say what is wrong with a certificate.
_CERTIFICATE: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$|Hostname Verification Check failed")
#: What each of a proxy's refusals means; no server of the protocol gives them.
_REFUSALS: Final = {
    grpc.StatusCode.UNAUTHENTICATED: "it wants other credentials (UNAUTHENTICATED; 'authorization_env' names them)",
    grpc.StatusCode.PERMISSION_DENIED: "it forbids the request (PERMISSION_DENIED)",
}


class RemoteGrpc:
    """A channel to one server; see :class:`conch.server.remote.transport.RemoteTransport`."""

    def __init__(self, url: RemoteUrl, model: RemoteModel) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        self._url = url
        self._model = model
        self._channel = self._open()
        #: Asks whether the model is ready where requests leave no room for that.
        self._asking: Any = None
        self._calls = 0
        self._metadata = tuple(model.headers.items())
        self._infer: Any = self._channel.unary_unary(f"{SERVICE_PATH}ModelInfer")
        self._stream: Any = self._channel.stream_stream(f"{SERVICE_PATH}ModelStreamInfer")
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())
        self._ending: dict[asyncio.Task[None], None] = {}

    def _open(self) -> Any:
        model, url = self._model, self._url
        options = (
            *ANY_SIZE,
            ("grpc.use_local_subchannel_pool", 1),  # one connection for each channel, which tells of its own faults
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", int(model.connect_timeout * 1000)),
            ("grpc.max_reconnect_backoff_ms", 1000),
        )
        if not url.is_encrypted:
            return grpc.aio.insecure_channel(url.address, options)
        tls = model.tls
        credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
        return grpc.aio.secure_channel(url.address, credentials, options)

    async def check(self) -> None:
        request = service_pb2.ModelReadyRequest(name=self._model.name, version=self._version)
        answer = service_pb2.ModelReadyResponse.FromString(await self._ask("ModelReady", request))
        if not answer.ready:
            metadata = service_pb2.ModelMetadataRequest(name=self._model.name, version=self._version)
            await self._ask("ModelMetadata", metadata)  # says so where there is no such model
            raise unavailable(f"model '{self._model.name}' is not ready there")

    async def config(self) -> ModelConfig:
        request = service_pb2.ModelConfigRequest(name=self._model.name, version=self._version)
        return service_pb2.ModelConfigResponse.FromString(await self._ask("ModelConfig", request)).config

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        message = encode_request(request, self._model.name, self._model.version, streamed=self._model.decoupled)
        self._calls += 1
        try:
            if self._model.decoupled:
                await self._infer_stream(message, seconds, deliver)
                return
            answer = await self._infer(message, timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, self._channel) from None
        finally:
            self._calls -= 1
        deliver(_decoded(answer))

    async def close(self) -> None:
        self._watching.cancel()
        if self._ending:
            await asyncio.wait(list(self._ending), timeout=_LAST_END_SECONDS)
        await self._channel.close()
        if self._asking is not None:
            await self._asking.close()

    @property
    def _version(self) -> str:
        return "" if self._model.version < 0 else str(self._model.version)

    async def _infer_stream(
        self, message: bytes, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        async def messages() -> AsyncIterator[bytes]:
            yield message

        metadata = (*self._metadata, (ERRORS_WITH_CODES, "true"))
        call = self._stream(messages(), timeout=seconds, metadata=metadata)
        answered = False
        try:
            async for answer in call:
                streamed = service_pb2.ModelStreamInferResponse.FromString(answer)
                if streamed.error_message:
                    answered = True
                    raise ConchError(streamed.error_message, Code.UNKNOWN)  # Triton's protocol has no code for it
                response = decode_response(streamed.infer_response)
                answered = response.final
                deliver(response)
                if answered:
                    return
        finally:
            if answered:
                self._let_end(call)
            else:
                call.cancel()  # does nothing to a call that has ended
        deliver(InferResponse())

    def _let_end(self, call: Any) -> None:
        """Leave the end of a stream that has been answered to the server: cancelled just then, Triton crashes."""
        ending = self._loop.create_task(_end_of(call))
        self._ending[ending] = None
        ending.add_done_callback(lambda _: self._ending.pop(ending, None))
        if len(self._ending) > _MOST_ENDING:
            next(iter(self._ending)).cancel()

    async def _ask(self, method: str, request: Any) -> bytes:
        """Call a method that says something of the model.  Raises what is wrong in words for whoever set it up."""
        channel = self._channel
        if self._calls + len(self._ending) >= _MANY:
            channel = self._asking = self._asking or self._open()
        call = channel.unary_unary(f"{SERVICE_PATH}{method}")
        try:
            answer: bytes = await call(
                request.SerializeToString(), timeout=self._model.connect_timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            status = error.code()
            if status is grpc.StatusCode.UNIMPLEMENTED:
                raise unavailable("it is not a server for this protocol (it does not know its methods)") from None
            if status is grpc.StatusCode.NOT_FOUND:
                raise unavailable(f"it has no model '{self._model.name}' ({error.details()})") from None
            try:
                raise self._error(error, channel)
            except TimeoutError:
                raise unavailable(f"no answer within {self._model.connect_timeout:g} s") from None
        return answer

    def _error(self, error: Any, channel: Any) -> Exception:
        status, details = error.code(), error.details() or ""
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError()
        if status is grpc.StatusCode.UNAVAILABLE:
            if details.startswith(_NO_CONNECTION):
                return UnreachedError(_cause(details))
            if details.startswith(_NO_ADDRESS):
                return UnreachedError(f"no connection: no address is known for '{self._url.host}'")
            if channel.get_state() is not grpc.ChannelConnectivity.READY:
                return LostError(f"the connection broke ({details})")
        if status in _REFUSALS:
            return unavailable(_REFUSALS[status])
        return ConchError(details or status.name, CODES.get(status.value[0], Code.UNKNOWN))

    async def _watch(self) -> None:
        """Tell of a connection that was there and has gone."""
        ready = grpc.ChannelConnectivity.READY
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.UsageError):
            while True:
                state = self._channel.get_state()
                await self._channel.wait_for_state_change(state)
                if state is ready:
                    self.on_broken()


async def _end_of(call: Any) -> None:
    """Read a stream until it ends, and cancel it if it does not."""
    try:
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_END_SECONDS):
                async for _ in call:
                    pass
    finally:
        call.cancel()  # does nothing to a call that has ended


def _decoded(answer: bytes) -> InferResponse:
    try:
        response = decode_response(service_pb2.ModelInferResponse.FromString(answer))
    except ConchError:
        raise
    except Exception as error:  # of the protobuf library: whatever the bytes are, they are no message
        raise internal(f"the answer is not a message of the protocol: {error}") from None
    response.final = True
    return response


def _cause(details: str) -> str:
    """Why there is no connection: the end of gRPC's chain of reasons."""
    cause = details.rpartition("last error: ")[2] or details
    certificate = _CERTIFICATE.search(cause)
    if certificate is not None:
        return f"its certificate is not accepted: {certificate[1] or certificate[0]}"
    if "http1.x server" in cause:
        return "it is not a server for this protocol (it speaks HTTP/1, so that an http:// address may be meant)"
    return f"no connection: {_BEFORE_CAUSE.sub('', cause)}"
