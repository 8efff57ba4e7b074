"""``conch.Client`` over gRPC, with a server that answers what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from conch.client import grpc as client_grpc
from conch.client.client import Client
from conch.client.grpc import GrpcTransport
from conch.client.requests import OutgoingRequest
from conch.client.service import ResultStream
from conch.client.transport import UnreachableError
from conch.core.errors import Code, ConchError
from conch.core.inference import ModelSignature
from tests.unit.client.test_client_http import HEALTH, WITH_TIMEOUT

REQUEST = OutgoingRequest(ModelSignature("m", 1, 0, {}, {}, decoupled=True), -1, {})


class FakeService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Sends an error on a stream, as Triton does, and continues for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.metadata: dict[str, str] = {}
        self.cancelled = threading.Event()
        self.ended = False

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        self.metadata = dict(context.invocation_metadata())
        context.add_callback(lambda: self.ended or self.cancelled.set())
        yield service_pb2.ModelStreamInferResponse(error_message="negative")
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not self.cancelled.wait(0.01):
            pass
        self.ended = not self.cancelled.is_set()

    def silent(self, request: Any, context: Any) -> Any:
        context.add_callback(self.cancelled.set)
        self.cancelled.wait()

    ModelConfig = ModelMetadata = ModelReady = ModelStatistics = silent
    ServerLive = ServerMetadata = ServerReady = silent
    RepositoryIndex = RepositoryModelLoad = RepositoryModelUnload = silent


@contextmanager
def served(service: FakeService) -> Iterator[int]:
    """The port of a server with ``service``."""
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def streamed(service: FakeService) -> Iterator[ResultStream]:
    with served(service) as port, closing(GrpcTransport("127.0.0.1", port, None)) as transport:
        yield transport.stream(REQUEST)


@pytest.mark.parametrize("call", [Client.infer, Client.infer_stream, Client.generate, Client.generate_stream])
def test_a_server_that_does_not_say_what_its_model_takes_has_the_timeout_of_the_call(call: Any) -> None:
    with served(FakeService(0)) as port, Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(ConchError, match=r"no response from model 'm' within 0\.2 s") as raised:
            call(client, "m", {"x": 1}, timeout=0.2)
    assert raised.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("arguments", WITH_TIMEOUT, ids=lambda arguments: arguments[0])
def test_every_call_has_its_timeout(arguments: tuple[str, ...]) -> None:
    name, *given = arguments
    with served(FakeService(0)) as port, Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(ConchError, match=r"no response from .* within 0\.2 s") as raised:
            getattr(client, name)(*given, timeout=0.2)
    assert raised.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("arguments", HEALTH, ids=" ".join)
def test_a_server_that_does_not_answer_in_time_is_not_live_or_ready(arguments: tuple[str, ...]) -> None:
    name, *given = arguments
    with served(FakeService(0)) as port, Client(f"127.0.0.1:{port}") as client:
        assert getattr(client, name)(*given, timeout=0.2) is False


def test_a_stream_whose_error_has_come_is_ended_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton crashes if a request is cancelled while its decoupled model continues after an error."""
    monkeypatch.setattr(client_grpc, "END_SECONDS", 60.0)  # a busy machine ends it late
    service = FakeService(0.1)
    with streamed(service) as stream:
        with pytest.raises(ConchError, match="negative") as raised:
            next(stream)
        assert service.ended and not service.cancelled.is_set()
        assert list(stream) == []
    assert raised.value.code is Code.UNKNOWN


def test_a_stream_that_continues_after_its_error_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_grpc, "END_SECONDS", 0.05)
    service = FakeService(60)
    with streamed(service) as stream:
        with pytest.raises(ConchError, match="negative"):
            next(stream)
        assert service.cancelled.wait(60)


def test_triton_is_not_asked_for_errors_with_codes() -> None:
    """With ``triton_grpc_error``, it crashes if a decoupled model continues after an error."""
    service = FakeService(0)
    with streamed(service) as stream:
        with pytest.raises(ConchError):
            next(stream)
    assert service.metadata["conch_grpc_error"] == "true" and "triton_grpc_error" not in service.metadata


def test_an_unreachable_server_is_named_with_the_cause() -> None:
    with (
        Client("grpc://[::1]:1") as client,
        pytest.raises(ConchError, match=r"^\[::1\]:1 does not respond: ") as raised,
    ):
        client.metadata(timeout=30)
    assert isinstance(raised.value, UnreachableError) and raised.value.cause.startswith("no connection: ")


def test_outputs_without_raw_contents_are_read() -> None:
    class TypedService(FakeService):
        def ModelInfer(self, request: Any, context: Any) -> Any:
            response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
            response.outputs.add(name="y", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
            return response

    request = OutgoingRequest(ModelSignature("m", 1, 0, {}, {}), -1, {})
    with served(TypedService(0)) as port, closing(GrpcTransport("127.0.0.1", port, None)) as transport:
        assert transport.infer(request)["y"].tolist() == [1, 2]
