"""Trace files for the requests of clients, of ensemble steps, and of models (BLS)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conformance.raw import post, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import build, write

CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.Tensor("X", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            call = dict(model_name="plus_one", inputs=[x], requested_output_names=["Y"])
            pb_utils.InferenceRequest(**call).exec()
            called = pb_utils.InferenceRequest(trace=request.trace(), **call).exec()
            y = pb_utils.Tensor("OUT", called.output_tensors()[0].as_numpy())
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
REQUEST = {"REQUEST_START", "QUEUE_START", "REQUEST_END"}
COMPUTE = {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}
DONE = "INFER_RESPONSE_COMPLETE"
HTTP = {"HTTP_RECV_START", "HTTP_RECV_END", DONE, "HTTP_SEND_START", "HTTP_SEND_END"}
GRPC = {"GRPC_WAITREAD_START", "GRPC_WAITREAD_END", DONE, "GRPC_SEND_START", "GRPC_SEND_END"}


class Part(NamedTuple):
    """One request of a trace: its model, its parent model, the client's ID, its timestamps."""

    model: str
    maker: str
    request_id: str
    moments: frozenset[str]


class Traces:
    """A server that writes every trace to a separate file."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server = server
        self._file = file
        self._read = 0

    def next(self) -> list[dict[str, Any]]:
        """Return the objects of the next trace."""
        path = Path(f"{self._file}.{self._read}")
        self._read += 1
        eventually(lambda: path.exists() and path.read_text().endswith("]"), f"{path} is written")
        return list(json.loads(path.read_text()))

    def parts(self) -> set[Part]:
        objects = self.next()
        headers = {one["id"]: one for one in objects if "model_name" in one}
        moments: dict[int, set[str]] = {}
        for one in objects:
            moments.setdefault(one["id"], set()).update(event["name"] for event in one.get("timestamps", ()))
        return {
            Part(
                header["model_name"],
                headers[header["parent_id"]]["model_name"] if "parent_id" in header else "",
                header.get("request_id", ""),
                frozenset(moments[id]),
            )
            for id, header in headers.items()
        }


@pytest.fixture(scope="module")
def traces(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    folder = tmp_path_factory.mktemp("traces")
    repository = build(folder / "models", "plus_one", "chain")
    write(repository, "caller", CONFIG, {"1/model.py": CALLER})
    settings = ("level=TIMESTAMPS", "rate=1", f"triton,file={folder}/t.json", "triton,log-frequency=1")
    with start(repository, *(f"--trace-config={setting}" for setting in settings)) as server:
        yield Traces(server, folder / "t.json")


def ask(traces: Traces, model: str, input: str, **more: Any) -> None:
    reply = post(
        traces.server.http,
        f"/v2/models/{model}/infer",
        {"inputs": [tensor(input, "FP32", [1.5, 1e-7], [1, 2])], **more},
    )
    assert reply.status == 200, reply.body


def test_a_request_over_http(traces: Traces) -> None:
    ask(traces, "plus_one", "X", id="one")
    assert traces.parts() == {Part("plus_one", "", "one", frozenset(REQUEST | COMPUTE | HTTP))}


def test_a_request_over_grpc(traces: Traces) -> None:
    client = grpcclient.InferenceServerClient(traces.server.grpc)
    x = grpcclient.InferInput("X", [1, 1], "FP32")
    x.set_data_from_numpy(np.ones([1, 1], np.float32))
    client.infer("plus_one", [x])
    assert traces.parts() == {Part("plus_one", "", "", frozenset(REQUEST | COMPUTE | GRPC))}


def test_the_steps_of_an_ensemble(traces: Traces) -> None:
    ask(traces, "chain", "X", id="two")
    step = Part("plus_one", "chain", "two", frozenset(REQUEST | COMPUTE))
    assert traces.parts() == {Part("chain", "", "two", frozenset(REQUEST | HTTP)), step}


def test_a_call_that_a_model_made_with_its_trace(traces: Traces) -> None:
    ask(traces, "caller", "IN", id="three")
    called = Part("plus_one", "caller", "", frozenset(REQUEST | COMPUTE))
    assert traces.parts() == {Part("caller", "", "three", frozenset(REQUEST | COMPUTE | HTTP)), called}


def test_tensors(traces: Traces) -> None:
    setting = "/v2/models/plus_one/trace/setting"
    assert post(traces.server.http, setting, {"trace_level": ["TIMESTAMPS", "TENSORS"]}).status == 200
    ask(traces, "plus_one", "X")
    assert post(traces.server.http, setting, {"trace_level": None}).status == 200
    shown = [(one["activity"], one["tensor"]) for one in traces.next() if "tensor" in one]
    assert shown == [
        ("TENSOR_QUEUE_INPUT", {"name": "X", "data": "1.5,1e-07", "shape": "1,2", "dtype": "FP32"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "Y", "data": "2.5,1", "shape": "1,2", "dtype": "FP32"}),
    ]
