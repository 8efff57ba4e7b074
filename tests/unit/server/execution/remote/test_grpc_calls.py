"""The gRPC client of remote models, against servers that answer what the test says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from conch.client.transport import LostError, UnreachableError
from conch.config.remote import RemoteSettings, read_url
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.execution.remote import grpc_calls
from conch.server.execution.remote.executor import RemoteTransport, connecting
from tests import certificates

Status = grpc.StatusCode


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers requests with two outputs; ``status`` ends every call in its place, ``hang`` keeps them.

    ``hold`` keeps them until it is set; ``ended`` says that they have gone on then.
    """

    def __init__(self) -> None:
        self.status: tuple[Any, str] | None = None
        self.hang = False
        self.ready = True
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.came = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.responses: list[Any] = []
        self.hold: asyncio.Event | None = None
        self.ended = asyncio.Event()

    async def _meet(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.came.set()
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            self.ended.set()
        if self.status is not None:
            await context.abort(*self.status)
        if self.hang:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

    async def ModelReady(self, request: Any, context: Any) -> Any:
        await self._meet(request, context)
        return service_pb2.ModelReadyResponse(ready=self.ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelMetadataResponse(name=request.name)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        await self._meet(request, context)
        return answer(b"\0\0\0\0", b"\1")

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            for response in self.responses:
                yield response
            await self._meet(request, context)


def answer(*raw: bytes) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m")
    message.parameters["k"].int64_param = 5
    message.outputs.add(name="y", datatype="FP32", shape=[1])
    message.outputs.add(name="z", datatype="BOOL", shape=[1])
    message.raw_output_contents.extend(raw)
    return message


def streamed(final: bool, *raw: bytes) -> Any:
    message = service_pb2.ModelStreamInferResponse()
    if raw:
        message.infer_response.CopyFrom(answer(*raw))
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return message


@asynccontextmanager
async def serving(
    credentials: Any = None, folder: Path = Path(), decoupled: bool = False, options: Any = (), **settings: Any
) -> AsyncIterator[tuple[GrpcServer, RemoteTransport, Any]]:
    fake, server = GrpcServer(), grpc.aio.server(options=options)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = (
        server.add_secure_port("127.0.0.1:0", credentials) if credentials else server.add_insecure_port("127.0.0.1:0")
    )
    await server.start()
    settings = {"connect_timeout": 60.0, **settings}  # a busy machine answers late
    connect = await connecting(RemoteSettings((), "m", **settings), folder, decoupled=decoupled)
    transport = connect(read_url(f"{'grpcs' if credentials else 'grpc'}://127.0.0.1:{port}"))
    try:
        yield fake, transport, server
    finally:
        await transport.close()
        await server.stop(0)


async def infer(transport: RemoteTransport, seconds: float | None = None) -> list[InferResponse]:
    found: list[InferResponse] = []
    inputs = {"x": WireTensor("x", "FP32", (1,), memoryview(b"\0\0\x80\x3f")), "e": WireTensor("e", "FP32", (0,), b"")}
    request = InferRequest(
        "local", inputs, lambda response: None, id="seven", outputs=("y",), correlation_id=2**64 - 1,
        flags=3, priority=2, timeout=9_000_000, parameters={"a": "b", "n": -1, "f": 0.5, "t": True},
    )  # fmt: skip
    await transport.infer(request, seconds, found.append)
    return found


async def test_a_request_is_sent_whole_and_its_answer_read() -> None:
    async with serving(version=4) as (fake, transport, _):
        (response,) = await infer(transport)
    (sent,) = fake.requests
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "4", "seven")
    assert list(sent.raw_input_contents) == [b"\0\0\x80\x3f", b""]
    assert [(tensor.name, list(tensor.shape)) for tensor in sent.inputs] == [("x", [1]), ("e", [0])]
    assert [output.name for output in sent.outputs] == ["y"]
    given = {
        name: getattr(parameter, parameter.WhichOneof("parameter_choice"))
        for name, parameter in sent.parameters.items()
    }
    assert given == {
        "a": "b", "n": -1, "f": 0.5, "t": True, "priority": 2, "timeout": 9_000_000,
        "sequence_id": -1, "sequence_start": True, "sequence_end": True,
    }  # fmt: skip
    assert [(tensor.name, bytes(tensor.data)) for tensor in response.outputs] == [("y", b"\0\0\0\0"), ("z", b"\1")]
    assert (response.final, response.parameters) == (True, {"k": 5})


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        ((Status.NOT_FOUND, "no such row"), Code.NOT_FOUND, "no such row"),
        ((Status.UNAVAILABLE, "Socket closed, says the model"), Code.UNAVAILABLE, "Socket closed, says the model"),
        ((Status.INTERNAL, ""), Code.INTERNAL, "INTERNAL"),
        ((Status.DATA_LOSS, "gone"), Code.UNKNOWN, "gone"),
        ((Status.UNAUTHENTICATED, "?"), Code.UNAVAILABLE, "it requires other credentials (UNAUTHENTICATED; "),
        ((Status.PERMISSION_DENIED, "?"), Code.UNAVAILABLE, "it forbids the request (PERMISSION_DENIED)"),
    ],
)
async def test_what_a_server_refuses_is_said_in_its_words(status: tuple[Any, str], code: Code, message: str) -> None:
    async with serving() as (fake, transport, _):
        fake.status = status
        with pytest.raises(ConchError) as raised:
            await infer(transport)
        assert type(raised.value) is ConchError
        assert (raised.value.code, raised.value.message.startswith(message)) == (code, True), raised.value


async def test_a_connection_that_breaks_is_lost_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "BREAK_SECONDS", 10.0)  # a busy machine reports it late
    async with serving() as (fake, transport, server):
        broken = asyncio.Event()
        transport.on_broken = broken.set
        fake.hang = True
        waiting = asyncio.create_task(infer(transport))
        await fake.came.wait()
        await server.stop(0)
        with pytest.raises(LostError, match="the connection broke"):
            await waiting
        await broken.wait()
        with pytest.raises(UnreachableError, match=r"^no connection: "):
            await infer(transport)


async def test_time_runs_out() -> None:
    async with serving() as (fake, transport, _):
        fake.hang = True
        while not fake.came.is_set():  # on a busy machine, the time may run out before the request arrives
            with pytest.raises(TimeoutError):
                await infer(transport, 0.05)
        await fake.cancelled.wait()


async def test_an_abandoned_request_is_cancelled() -> None:
    async with serving() as (fake, transport, _):
        fake.hang = True
        waiting = asyncio.create_task(infer(transport))
        await fake.came.wait()
        waiting.cancel()
        await fake.cancelled.wait()


def failed(message: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=message)


@pytest.mark.parametrize("last", [streamed(True), failed("in band")])
async def test_what_ends_a_request_is_reported_while_its_stream_continues(last: Any) -> None:
    """Triton crashes of a cancellation that comes as it ends a stream, so that the server ends it."""
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [last]
        fake.hold = asyncio.Event()
        if last.error_message:
            with pytest.raises(ConchError, match="in band") as raised:
                await infer(transport)
            assert raised.value.code is Code.UNKNOWN
        else:
            assert [response.final for response in await infer(transport)] == [True]
        await fake.came.wait()
        assert not fake.ended.is_set()
        fake.hold.set()
        await fake.ended.wait()
        assert not fake.cancelled.is_set()


async def test_a_stream_that_is_ending_as_the_model_is_unloaded_is_ended_by_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_calls, "UNLOAD_END_SECONDS", 60.0)  # a busy machine ends it late
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [streamed(True)]
        fake.hold = asyncio.Event()
        await infer(transport)
        await fake.came.wait()
        closing = asyncio.create_task(transport.close())
        await asyncio.sleep(0)
        fake.hold.set()
        await closing
        assert fake.ended.is_set() and not fake.cancelled.is_set()


async def test_a_stream_that_does_not_end_is_cancelled_as_the_model_is_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_calls, "UNLOAD_END_SECONDS", 0.01)
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [streamed(True)]
        fake.hang = True
        await infer(transport)
        await fake.came.wait()
        await transport.close()
        await fake.cancelled.wait()


async def test_of_too_many_streams_that_do_not_end_the_oldest_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "MOST_ENDING", 1)
    monkeypatch.setattr(grpc_calls, "UNLOAD_END_SECONDS", 0.01)
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [streamed(True)]
        fake.hang = True
        await infer(transport)
        await fake.came.wait()
        assert not fake.cancelled.is_set()
        await infer(transport)
        await fake.cancelled.wait()


async def test_a_stream_that_its_server_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "END_SECONDS", 0.01)
    async with serving(decoupled=True) as (fake, transport, _):
        fake.hang = True
        fake.responses = [streamed(False, b"\0\0\0\0", b"\1"), streamed(True)]
        first, last = await infer(transport)
        assert (len(first.outputs), first.final) == (2, False)
        assert (last.empty, last.final) == (True, True)
        await fake.came.wait()
        assert fake.requests[0].parameters["triton_enable_empty_final_response"].bool_param
        assert fake.metadata["conch_grpc_error"] == "true" and "triton_grpc_error" not in fake.metadata
        await fake.cancelled.wait()


async def test_a_stream_without_a_final_response_ends_all_the_same() -> None:
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [streamed(False, b"\0\0\0\0", b"\1")]
        assert [response.final for response in await infer(transport)] == [False, True]


async def test_an_answer_without_its_data_is_refused() -> None:
    async with serving(decoupled=True) as (fake, transport, _):
        fake.responses = [streamed(False, b"\0\0\0\0")]
        with pytest.raises(ConchError, match="the response has 2 outputs and the data of 1"):
            await infer(transport)


async def test_the_question_whether_a_model_is_ready_says_what_is_wrong() -> None:
    async with serving() as (fake, transport, _):
        await transport.check()
        fake.ready = False
        with pytest.raises(ConchError, match="model 'm' is not ready there"):
            await transport.check()
        for status, reason in (
            ((Status.NOT_FOUND, "unknown model"), "it has no model 'm' (unknown model)"),
            ((Status.UNIMPLEMENTED, ""), "it is not a server for this protocol (unknown method)"),
            ((Status.PERMISSION_DENIED, ""), "it forbids the request (PERMISSION_DENIED)"),
        ):
            fake.status = status
            with pytest.raises(ConchError, match=re.escape(reason)):
                await transport.check()


async def test_a_server_that_does_not_answer_the_question_is_away() -> None:
    async with serving(connect_timeout=0.2) as (fake, transport, _):
        fake.hang = True
        with pytest.raises(ConchError, match=r"no response within 0\.2 s") as raised:
            await transport.check()
        assert type(raised.value) is ConchError  # it may be busy: its sequences are not lost


async def test_a_server_whose_connection_is_full_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_calls, "MANY_CALLS", 2)
    async with serving(options=[("grpc.max_concurrent_streams", 2)]) as (fake, transport, _):
        fake.hang = True
        waiting = []
        for _ in range(2):
            fake.came.clear()
            waiting.append(asyncio.create_task(infer(transport)))
            await fake.came.wait()
        fake.hang = False
        await transport.check()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_TOKEN", "Bearer secret")
    async with serving(authorization_env="REMOTE_TOKEN") as (fake, transport, _):
        await infer(transport)
        assert fake.metadata["authorization"] == "Bearer secret"


async def test_certificates_are_checked_against_the_file(tmp_path: Path) -> None:
    certificates.make(tmp_path, "server", "client", "stranger")

    def read(name: str) -> bytes:
        return (tmp_path / name).read_bytes()

    pair = [(read("server.key"), read("server.pem"))]
    own = {"certificate_file": "client.pem", "key_file": "client.key"}
    credentials = grpc.ssl_server_credentials(pair, read("client.pem"), require_client_auth=True)
    async with serving(credentials, tmp_path, ca_file="server.pem", **own) as (_, transport, _):
        await infer(transport)
    async with serving(credentials, tmp_path, ca_file="stranger.pem", **own) as (_, transport, _):
        with pytest.raises(UnreachableError, match=r"its certificate is not accepted: self.signed certificate"):
            await infer(transport)


async def test_a_host_without_an_address_is_not_reached() -> None:
    connect: Callable[..., RemoteTransport] = await connecting(RemoteSettings((), "m"), Path(), decoupled=False)
    transport = connect(read_url("grpc://no-such-host.invalid"))
    with pytest.raises(UnreachableError, match=r"no connection: no address is known for 'no-such-host\.invalid'"):
        await infer(transport)
    await transport.close()


async def test_an_http_server_is_no_server_of_this_protocol() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    connect: Callable[..., RemoteTransport] = await connecting(RemoteSettings((), "m"), Path(), decoupled=False)
    transport = connect(read_url(f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    with pytest.raises(UnreachableError, match=r"the server speaks HTTP/1 instead of gRPC"):
        await transport.check()
    await transport.close()
    server.close()
