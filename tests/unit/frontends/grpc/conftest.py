"""The front end with a model of every behaviour, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from conch.core.errors import invalid, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import split_bytes
from tests.unit.frontends.grpc.fake_core import FakeModel, echo, hold, output
from tests.unit.frontends.grpc.harness import Frontend


def count_down(request: InferRequest) -> None:
    """One response for each number given, a negative one as an error, then an empty final response."""
    tensor = request.inputs["INPUT0"]
    for number in np.frombuffer(tensor.data, np.int32):
        if number < 0:
            request.respond(InferResponse(error=invalid("negative"), final=False))
        else:
            request.respond(output(request, tensor, final=False))
    request.respond(InferResponse())


def misbehave(request: InferRequest) -> None:
    """What the input says."""
    tensor = request.inputs["INPUT0"]
    (mode,) = split_bytes(tensor.data)
    if mode == b"twice":
        request.respond(output(request, tensor, final=False))
        request.respond(output(request, tensor))
    elif mode == b"late final":
        request.respond(output(request, tensor, final=False))
        request.respond(InferResponse())
    elif mode == b"no outputs":
        request.respond(InferResponse())
    elif mode == b"parameters":
        request.respond(output(request, tensor, truth=True, number=-7, real=0.5, text="ü"))
    elif mode == b"unsendable":
        request.respond(output(request, tensor, number=2**70))
    elif mode == b"refuse":
        raise unavailable("Exceeds maximum queue size")
    elif mode == b"crash":
        raise RuntimeError("a bug")
    else:
        request.fail(invalid(mode.decode(errors="replace")))


def models() -> list[FakeModel]:
    return [
        FakeModel("echo", echo),
        FakeModel("batched", echo, dims=(1,), max_batch_size=16),
        FakeModel("fp32", echo, datatype="FP32", labels=["a", "b", "c"]),
        FakeModel("hold", hold),
        FakeModel("count_down", count_down, datatype="INT32", decoupled=True),
        FakeModel("hold_decoupled", hold, decoupled=True),
        FakeModel("misbehave", misbehave),
    ]


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with Frontend(*models()) as frontend:
        yield frontend


@pytest.fixture
def client(frontend: Frontend) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(frontend.target) as client:
        yield client


@pytest.fixture
def channel(frontend: Frontend) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(frontend.target, UNLIMITED) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def text_request(model: str, text: str | bytes, **fields: str) -> pb.ModelInferRequest:
    """A request with one BYTES element."""
    element = text.encode() if isinstance(text, str) else text
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(element).to_bytes(4, "little") + element)
    return request


def array_request(model: str, array: np.ndarray, **fields: str) -> pb.ModelInferRequest:
    datatype = {"f4": "FP32", "i4": "INT32"}[array.dtype.str[1:]]
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="INPUT0", datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


def text_of(response: pb.ModelInferResponse) -> str:
    (element,) = split_bytes(response.raw_output_contents[0])
    return element.decode()
