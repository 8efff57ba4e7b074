"""BYTES inputs in shared memory: long ones are counted in a process, not on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.core.tensors import pack_bytes
from conch.frontends.offloading.offloader import LARGE_BYTES
from conch.telemetry.tracing.trace import Trace
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues
from tests.unit.frontends.grpc.conftest import text_of, text_request
from tests.unit.frontends.grpc.harness import Frontend

#: More elements than are counted on the event loop, in more bytes than are handled there.
COUNT = LARGE_BYTES // 4
TEXTS = pack_bytes([b"x"] * COUNT)


@pytest.fixture
def region(frontend: Frontend) -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=len(TEXTS))
    try:
        memory.buf[: len(TEXTS)] = TEXTS
        frontend.wait(frontend.server.regions.register_system("texts", f"/{memory.name}", 0, len(TEXTS)))
        yield memory
    finally:
        memory.close()
        memory.unlink()


@pytest.fixture
def offloaded(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that were called in a process."""
    names: list[str] = []
    run = frontend.offloader.run

    async def recorded(size, function, *arguments):
        if size > LARGE_BYTES:
            names.append(function.__name__)
        return await run(size, function, *arguments)

    monkeypatch.setattr(frontend.offloader, "run", recorded)
    return names


def shared_request(model: str, size: int = len(TEXTS), **fields: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    tensor = request.inputs.add(name="INPUT0", datatype="BYTES", shape=[COUNT])
    tensor.parameters["shared_memory_region"].string_param = "texts"
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    return request


def test_long_texts_in_shared_memory_are_counted_in_a_process(frontend, stub, region, offloaded):
    response = stub.ModelInfer(shared_request("echo"))
    assert response.raw_output_contents[0] == TEXTS
    assert (offloaded, len(frontend.server.models["echo"].received)) == (["strings"], 1)


def test_malformed_texts_in_shared_memory_are_refused(frontend, stub, region, offloaded):
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(shared_request("echo", len(TEXTS) - 1))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "incomplete string data for inference input 'INPUT0'" in refused.value.details()
    assert offloaded == ["strings"] and not frontend.server.models["echo"].received


def test_malformed_texts_in_shared_memory_end_their_trace(frontend, stub, region):
    written: list[Trace] = []
    sink = SimpleNamespace(append=written.extend, close=lambda: None)
    frontend.server.tracing = Tracing(TraceValues(level=("TIMESTAMPS",), rate=1, file="t"), sink)
    stub.ModelInfer(shared_request("echo"))
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(shared_request("echo", len(TEXTS) - 1))
    frontend.server.tracing.close()
    assert len(written) == 2


def test_a_stream_keeps_its_order_while_texts_are_counted(stub, region, offloaded):
    requests = [shared_request("echo", id="0"), text_request("echo", "a", id="1"), shared_request("echo", 9, id="2")]
    responses = list(stub.ModelStreamInfer(iter(requests)))
    assert responses[0].infer_response.raw_output_contents[0] == TEXTS
    assert text_of(responses[1].infer_response) == "a"
    assert responses[2].error_message and offloaded == ["strings"]


def test_a_call_that_ends_while_texts_are_counted_never_reaches_its_model(frontend, stub, region, monkeypatch):
    states: list[str] = []

    async def never(*_: object) -> None:
        states.append("counting")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            states.append("cancelled")
            raise

    monkeypatch.setattr(frontend.offloader, "run", never)
    call = stub.ModelInfer.future(shared_request("echo"))
    frontend.until(lambda: states)
    call.cancel()
    frontend.until(lambda: len(states) == 2 and not frontend.budget.used)
    assert states == ["counting", "cancelled"] and not frontend.server.models["echo"].received
