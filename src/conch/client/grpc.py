"""``conch.Client`` over gRPC; errors of all outgoing gRPC calls."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

from conch.client.connection import TlsContents, TlsFiles
from conch.client.deadline import Deadline
from conch.client.requests import OutgoingRequest
from conch.client.results import InferResult
from conch.client.service import ResultStream
from conch.client.transport import ConnectionFailedError, UnreachableError
from conch.client.values import decode
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, unavailable
from conch.core.protocol import grpc_service
from conch.machine.ports import host_and_port
from conch.wire.grpc.infer import ERRORS_WITH_CODES
from conch.wire.grpc.outgoing import ANY_SIZE, CODES, SERVICE_PATH, decode_response, encode_request


def document_of(message: Any) -> dict[str, Any]:
    """Return all fields of a message by name, including unset ones; numbers stay numbers, maps become dicts."""
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = field.message_type.fields_by_name["value"]
            document[field.name] = {
                key: value[key] if of.message_type is None else document_of(value[key]) for key in value
            }
        elif field.message_type is None:
            document[field.name] = list(value) if isinstance(field.default_value, list) else value
        elif isinstance(field.default_value, list):
            document[field.name] = [document_of(element) for element in value]
        else:
            document[field.name] = document_of(value)
    return document


#: Asks conch to report stream errors with their codes, at the end of the stream.
STREAM_METADATA: Final = ((ERRORS_WITH_CODES, "true"),)
#: How long a server may take to end a stream after its final response or error (s): Triton crashes if a stream is
#: cancelled while it ends.
END_SECONDS: Final = 5.0

#: Start of gRPC's message for a call without a connection.
_NO_CONNECTION: Final = "failed to connect to all addresses"
#: Start of gRPC's message for a host without an address: before gRPC 1.75, and since.
_NO_ADDRESS: Final = ("DNS resolution failed", "errors resolving ")
#: Text before the cause in a message: a status and the address, which is already known.
_BEFORE_CAUSE: Final = re.compile(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?(?:Failed to connect to remote host: )?")
#: Certificate errors of BoringSSL and of gRPC itself.
_CERTIFICATE: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$|Hostname Verification Check failed")


def channel_credentials(tls: TlsContents) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)


def call_error(error: Any, host: str, address: str = "") -> ConchError:
    """Return the error of a failed call of ``grpc`` or ``grpc.aio`` to ``host``; the caller handles its deadline.

    ConnectionFailedError is a broken connection, or the server's own UNAVAILABLE. ``address`` is named in errors.
    """
    status, details = error.code(), error.details() or ""
    if status is not grpc.StatusCode.UNAVAILABLE:
        return ConchError(details or status.name, CODES.get(status.value[0], Code.UNKNOWN))
    if details.startswith(_NO_CONNECTION):
        return UnreachableError(_connect_failure(details), address)
    if details.startswith(_NO_ADDRESS):
        return UnreachableError(f"no connection: no address is known for '{host}'", address)
    return ConnectionFailedError(details or status.name)


def _connect_failure(details: str) -> str:
    """Return the reason for a failed connection: the last cause in gRPC's message."""
    cause = details.rpartition("last error: ")[2] or details
    certificate = _CERTIFICATE.search(cause)
    if certificate is not None:
        return f"its certificate is not accepted: {certificate[1] or certificate[0]}"
    if "http1.x server" in cause:
        return "the server speaks HTTP/1 instead of gRPC: use an http:// address"
    return f"no connection: {_BEFORE_CAUSE.sub('', cause)}"


class GrpcTransport:
    """A channel to ``host:port``, encrypted with ``tls``; ``headers`` are sent with every call.

    Raises INVALID_ARG for unusable files.
    """

    def __init__(
        self, host: str, port: int, tls: TlsFiles | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._host, self._address = host, host_and_port(host, port)
        self._channel: Any = (
            grpc.secure_channel(self._address, channel_credentials(tls.contents()), options=ANY_SIZE)
            if tls is not None
            else grpc.insecure_channel(self._address, options=ANY_SIZE)
        )
        self._headers = tuple((name.lower(), value) for name, value in (headers or {}).items())
        # Requests are sent as bytes, so that tensors are copied only once.
        self._infer: Any = self._channel.unary_unary(
            f"{SERVICE_PATH}ModelInfer", None, grpc_service.ModelInferResponse.FromString
        )
        self._stream: Any = self._channel.stream_stream(
            f"{SERVICE_PATH}ModelStreamInfer", None, grpc_service.ModelStreamInferResponse.FromString
        )

    def live(self, deadline: Deadline) -> bool:
        return bool(self._call("ServerLive", grpc_service.ServerLiveRequest(), deadline).live)

    def ready(self, model: str, version: int, deadline: Deadline) -> bool:
        if not model:
            return bool(self._call("ServerReady", grpc_service.ServerReadyRequest(), deadline).ready)
        request = grpc_service.ModelReadyRequest(name=model, version=_version(version))
        return bool(self._call("ModelReady", request, deadline).ready)

    def metadata(self, model: str, version: int, deadline: Deadline) -> dict[str, Any]:
        if not model:
            return document_of(self._call("ServerMetadata", grpc_service.ServerMetadataRequest(), deadline))
        request = grpc_service.ModelMetadataRequest(name=model, version=_version(version))
        return document_of(self._call("ModelMetadata", request, deadline))

    def config(self, model: str, version: int, deadline: Deadline) -> ModelConfig:
        message = grpc_service.ModelConfigRequest(name=model, version=_version(version))
        return self._call("ModelConfig", message, deadline, model).config

    def statistics(self, model: str, version: int, deadline: Deadline) -> list[dict[str, Any]]:
        request = grpc_service.ModelStatisticsRequest(name=model, version=_version(version))
        entries: list[dict[str, Any]] = document_of(self._call("ModelStatistics", request, deadline))["model_stats"]
        return entries

    def index(self, deadline: Deadline) -> list[dict[str, str]]:
        models = document_of(self._call("RepositoryIndex", grpc_service.RepositoryIndexRequest(), deadline))["models"]
        return [{key: text for key, text in entry.items() if text} for entry in models]

    def load(self, model: str, config: str | None, files: Mapping[str, bytes], deadline: Deadline) -> None:
        request = grpc_service.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        self._call("RepositoryModelLoad", request, deadline)

    def unload(self, model: str, dependents: bool, deadline: Deadline) -> None:
        request = grpc_service.RepositoryModelUnloadRequest(model_name=model)
        request.parameters["unload_dependents"].bool_param = dependents
        self._call("RepositoryModelUnload", request, deadline)

    def register_memory(self, region: str, key: str, size: int, deadline: Deadline) -> None:
        request = grpc_service.SystemSharedMemoryRegisterRequest(name=region, key=key, byte_size=size)
        self._call("SystemSharedMemoryRegister", request, deadline)

    def unregister_memory(self, region: str, deadline: Deadline) -> None:
        self._call(
            "SystemSharedMemoryUnregister", grpc_service.SystemSharedMemoryUnregisterRequest(name=region), deadline
        )

    def infer(self, request: OutgoingRequest) -> InferResult:
        message = encode_request(request.to_infer_request(), request.model, request.version)

        def send(left: float | None) -> Any:
            return self._infer(message, timeout=left, metadata=self._headers)

        return _result(self._within(request.deadline, request.model, send))

    def stream(self, request: OutgoingRequest) -> ResultStream:
        message = encode_request(request.to_infer_request(), request.model, request.version)

        def send(left: float | None) -> Any:
            return self._stream(iter([message]), timeout=left, metadata=(*self._headers, *STREAM_METADATA))

        return _GrpcStream(self._within(request.deadline, request.model, send), request, self._error)

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, deadline: Deadline, model: str = "") -> Any:
        """Return the response; ``model`` is the model named in the error at the deadline."""
        call: Any = self._channel.unary_unary(
            f"{SERVICE_PATH}{method}",
            type(request).SerializeToString,
            getattr(grpc_service, f"{method}Response").FromString,
        )
        return self._within(deadline, model, lambda left: call(request, timeout=left, metadata=self._headers))

    def _within(self, deadline: Deadline, model: str, call: Callable[[float | None], Any]) -> Any:
        """Return the result of ``call``, which takes the remaining seconds."""
        try:
            return call(deadline.left())
        except TimeoutError:
            raise deadline.no_response(model) from None
        except grpc.RpcError as error:
            raise self._error(error, deadline, model) from None
        except ValueError:  # with these messages, gRPC raises ValueError only on a closed channel
            raise unavailable("the client is closed") from None

    def _error(self, error: Any, deadline: Deadline, model: str) -> ConchError:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and deadline.at is not None:
            return deadline.no_response(model)
        return call_error(error, self._host, self._address)


class _GrpcStream(ResultStream):
    """The responses of a call with one request."""

    def __init__(self, call: Any, request: OutgoingRequest, error: Callable[[Any, Deadline, str], ConchError]) -> None:
        self._call = call
        self._request = request
        self._error = error
        self._closed = False

    def __next__(self) -> InferResult:
        while not self._closed:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                if self._closed:
                    break
                raise self._error(error, self._request.deadline, self._request.model) from None
            if message.error_message:
                self._leave_to_end()
                raise ConchError(message.error_message, Code.UNKNOWN)  # the protocol has no code for it
            # A decoupled model without outputs sends only an empty final response.
            if message.infer_response.outputs or not self._request.signature.decoupled:
                return _result(message.infer_response)
        raise StopIteration

    def close(self) -> None:
        self._closed = True
        self._call.cancel()

    def _leave_to_end(self) -> None:
        """Wait until the server has ended the stream: Triton crashes if it is cancelled at that moment."""
        timer = threading.Timer(END_SECONDS, self._call.cancel)
        timer.start()
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass
        timer.cancel()
        self.close()


def _result(message: grpc_service.ModelInferResponse) -> InferResult:
    response = decode_response(message)
    outputs = {tensor.name: decode(tensor) for tensor in response.outputs}
    return InferResult(message.model_name, message.model_version, outputs, message.id, response.parameters)


def _version(number: int) -> str:
    return "" if number < 0 else str(number)
