"""Models that call, load and unload other models (BLS)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import Client, ints, strings
from tests.conformance.counts import settled
from tests.conformance.raw import get, post
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import build, write

RAISED = "TritonModelException"
BLS = "Error when running inference"
EXPLICIT = (
    "Failed to process the request for model 'calling_0', message: explicit model load / unload is not allowed if "
    "polling is enabled; this server runs with --model-control-mode=none: start it with explicit"
)

#: The result of each function of the model ``calling``.
CALLS: dict[str, Any] = {
    "ensemble": {"Y": [[3.0, 4.0]]},
    "all_outputs": ["REQUEST", "SPARE"],
    "version": ["1", "2", "10"],
    "attributes": {
        "id": "inner",
        "correlation_id": 7,
        "flags": 3,
        "timeout": 5_000_000,
        "parameters": {"a": 1, "b": True, "c": "d"},
        "outputs": ["REQUEST"],
        "cancelled": False,
    },
    "correlation_text": "seven",
    "model_errors": ["NOT_FOUND fails", "default fails", {"OUTPUT": [["ok"]]}],
    "model_error_code": True,
    "model_raises": "Failed to process the request(s) for model 'faults_0', message: ValueError: execute raises",
    "ensemble_error": "in ensemble 'failing', default fails",
    "refused": [
        f"Model chain - {BLS}: unexpected inference output 'Z' for model 'chain'",
        f"Model chain - {BLS}: [request id: inner] inference input 'X' data-type is 'INT32', but model 'chain' "
        "expects 'FP32'",
        f"Model version_all - {BLS}: Failed for execute the inference request. Model 'version_all' is not ready.",
    ],
    "large": [[1, 1_000_000], 1.0, 1e6, True],
    "text": [0, 1, 100_000],
    "empty_name": [
        RAISED, "Requested output name for request with id 'inner' and model name 'chain' should not be empty."
    ],
    "threads": [[float(number + 1)] for number in range(64)],
    "twice": [{"Y": [[5.0]]}, {"Y": [[5.0]]}],
    "output_passed_on": {"Y": [[6.0]]},
    "gathered": [[float(number + 1)] for number in range(16)],
    "gathered_decoupled": [[{"OUT": [1]}, {"OUT": [2]}, {}], [{}], [{"OUT": [3]}, "negative", {"OUT": [4]}, {}]],
    "async_without_loop": ["RuntimeError", "no running event loop"],
    "decoupled_of_another": [{"Y": [[2.0]]}],
    "decoupled_with_final": [{"OUT": [3]}, {"OUT": [3]}, {"OUT": [3]}],
    "decoupled_again": [
        {"OUT": [5]},
        [{"OUT": [6]}, {}],
        [{"OUT": [5]}, {"OUT": [6]}, {}],
        [{"OUT": [5]}, {"OUT": [6]}, {}],
    ],
    "decoupled_unknown": [
        f"Model absent - {BLS}: Failed for execute the inference request. Model 'absent' is not ready."
    ],
    "decoupled_ensemble": [{"OUT": [2]}, {"OUT": [3]}],
    "decoupled_abandoned": {"OUT": [1]},
    "many_decoupled": sum(range(500)),
    "other_callers": [{"RESULT": [1, 2, 3, 0, 1, 2]}, [{"OUT": [1]}, {"OUT": [2]}, {}]],
    "load_refused": [
        [RAISED, f"Failed to load model: {EXPLICIT}"],
        [RAISED, f"Failed to unload model: {EXPLICIT}"],
        [RAISED, "failed to load model 'plus_one', files should be a dictionary of file paths and file contents"],
    ],
}  # fmt: skip

#: The result of Triton 2.51, where it differs.
TRITON: dict[str, Any] = {
    "model_error_code": False,  # newer releases preserve the code
    "gathered_decoupled": [[{"OUT": [1]}, {"OUT": [2]}, {}], [{}], [{"OUT": [3]}, {"OUT": [4]}, {}]],
}


@pytest.fixture
def http(server: Server) -> Client:
    return Client("http", server)


@pytest.mark.parametrize("case", CALLS)
def test_call(http: Client, case: str, server_kind: str) -> None:
    if (server_kind, case) == ("triton", "load_refused"):
        pytest.skip("2.51 now and then dies of it")
    expected = TRITON.get(case, CALLS[case]) if server_kind == "triton" else CALLS[case]
    result = http.infer("calling", {"CASE": strings(case)})
    assert json.loads(result["RESULT"][0]) == expected


def counts(server: Server, model: str) -> tuple[int, int]:
    def read() -> tuple[int, int]:
        [statistics] = get(server.http, f"/v2/models/{model}/stats").json()["model_stats"]
        return statistics["inference_count"], statistics["inference_stats"]["success"]["count"]

    return settled(server, read)


def test_calls_are_counted_as_requests(http: Client, server: Server) -> None:
    before = counts(server, "plus_one")
    http.infer("calling_async", {"X": ints(5)})
    assert counts(server, "plus_one") == (before[0] + 5, before[1] + 5)


LOADER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

CONFIG = json.dumps({"backend": "python", "input": [{"name": "INPUT", "data_type": "TYPE_INT32", "dims": [1]}],
                     "output": [{"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]}]})
MODEL = b'''
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([42], np.int32))]) for _ in requests]
'''

def infer(name):
    value = pb_utils.Tensor("INPUT", np.zeros(1, np.int32))
    response = pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUTPUT"], inputs=[value]).exec()
    return response.error().message() if response.has_error() else int(response.output_tensors()[0].as_numpy()[0])

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("plus_one")
        self.ready = pb_utils.is_model_ready("plus_one")

    def execute(self, requests):
        seen = [self.ready, pb_utils.is_model_ready("identity_string"), pb_utils.is_model_ready("fresh")]
        pb_utils.load_model("fresh", config=CONFIG, files={"file:1/model.py": MODEL})
        seen += [pb_utils.is_model_ready("fresh"), pb_utils.is_model_ready("fresh", "1"), infer("fresh")]
        pb_utils.unload_model("fresh")
        seen += [pb_utils.is_model_ready("fresh"), infer("fresh")]
        if requests[0].inputs()[0].as_numpy()[0]:
            try:
                pb_utils.load_model("absent")
            except pb_utils.TritonModelException as error:
                seen.append(str(error))
        result = pb_utils.Tensor("RESULT", np.array([json.dumps(seen)], np.object_))
        return [pb_utils.InferenceResponse([result]) for _ in requests]

    def finalize(self):
        pb_utils.unload_model("plus_one")
"""
LOADER_CONFIG = """
backend: "python"
output { name: "RESULT" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.fixture
def explicit(tmp_path: Path, start: Start, logs: Path, server_kind: str) -> Iterator[Server]:
    repository = build(tmp_path / "models", "plus_one", "identity_string", "calling_async")
    write(repository, "loader", LOADER_CONFIG, {"1/model.py": LOADER})
    flags = ("--model-control-mode=explicit", "--load-model=calling_async")
    with start(repository, *flags, log=logs / f"bls_{server_kind}.log") as server:
        yield server


def test_model_loads_and_unloads_others(explicit: Server, server_kind: str) -> None:
    assert post(explicit.http, "/v2/repository/models/loader/load", {}).status == 200
    fail = ints(server_kind == "conch")  # a failed load crashes Triton 2.51
    result = json.loads(Client("grpc", explicit).infer("loader", {"X": fail})["RESULT"][0])
    assert result[:8] == [
        True, False, False, True, True, 42, False,
        f"Model fresh - {BLS}: Failed for execute the inference request. Model 'fresh' is not ready.",
    ]  # fmt: skip
    failure = (
        "Failed to load model: Failed to process the request for model 'loader_0', message: failed to load 'absent', "
    )
    assert all(message.startswith(failure) for message in result[8:])
    assert get(explicit.http, "/v2/models/plus_one/ready").status == 200
    assert post(explicit.http, "/v2/repository/models/loader/unload", {}).status == 200
    eventually(lambda: get(explicit.http, "/v2/models/plus_one/ready").status == 400, "unloading by finalize")
