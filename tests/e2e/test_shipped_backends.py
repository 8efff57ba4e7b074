"""The backends for tests that come with conch, driven by the clients for which they are made."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conformance.raw import get, post, tensor
from tests.models import write
from tests.servers import ConchServer

CONTROLS = {
    "START": "CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]",
    "READY": "CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ]",
    "END": "CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ]",
    "CORRID": "CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64",
}


def sequences(backend: str, strategy: str, *controls: str) -> str:
    inputs = " ".join(f'control_input {{ name: "{name}" control {{ kind: {CONTROLS[name]} }} }}' for name in controls)
    return (
        f'backend: "{backend}" max_batch_size: 4 '
        f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {strategy} {inputs} }} "
        'input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } '
        'output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }'
    )


MODELS = {
    "identity_bf16": 'backend: "identity" input { name: "INPUT0" data_type: TYPE_BF16 dims: [ 2 ] } '
    'output { name: "OUTPUT0" data_type: TYPE_BF16 dims: [ 2 ] }',
    "repeat_int32": 'backend: "repeat"',
    "square_int32": 'backend: "square" runtime: "model.py"',
    "direct": sequences("sequence", "direct { }", "START", "READY"),
    "oldest": sequences("dyna_sequence", "oldest { max_candidate_sequences: 4 }", "START", "END", "READY", "CORRID"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder: Path = tmp_path_factory.mktemp("shipped")
    for name, config in MODELS.items():
        write(folder / "models", name, config, {"1/data": ""})
    with ConchServer(folder / "models", log=folder / "server.log") as server:
        yield server


def streamed(server: ConchServer, model: str, **inputs: NDArray[Any]) -> list[dict[str, int]]:
    """The responses to one request on a stream, up to the empty one that ends them."""
    answers: SimpleQueue[Any] = SimpleQueue()
    given = []
    for name, array in inputs.items():
        given.append(grpcclient.InferInput(name, list(array.shape), str(array.dtype).upper()))
        given[-1].set_data_from_numpy(array)
    found: list[dict[str, int]] = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, given, enable_empty_final_response=True)
        while True:
            result = answers.get(timeout=60)
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                return found
            found.append({output.name: int(result.as_numpy(output.name)[0]) for output in response.outputs})


def test_identity_gives_back_what_numpy_has_no_type_for(server: ConchServer) -> None:
    request = service_pb2.ModelInferRequest(
        model_name="identity_bf16", raw_input_contents=[b"\x80\x3f\x00\x40"]
    )  # 1, 2
    request.inputs.add(name="INPUT0", datatype="BF16", shape=[2])
    with grpc.insecure_channel(server.grpc) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert reply.raw_output_contents[0] == b"\x80\x3f\x00\x40"
    assert reply.parameters["param1"].int64_param == 42


def test_decoupled_backends_stream(server: ConchServer) -> None:
    given = {"IN": np.array([5, 6], np.int32), "DELAY": np.zeros(2, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    assert streamed(server, "repeat_int32", **given) == [{"OUT": 5, "IDX": 0}, {"OUT": 6, "IDX": 1}]
    assert streamed(server, "square_int32", IN=np.array([2], np.int32)) == [{"OUT": 2}] * 2
    assert get(server.http, "/v2/models/square_int32/config").json()["model_transaction_policy"] == {"decoupled": True}


@pytest.mark.parametrize(("model", "last"), [("direct", 6), ("oldest", 6 + 1)])
def test_sequences_add_up_whichever_slot_they_are_in(server: ConchServer, model: str, last: int) -> None:
    def run(sequence: int) -> list[int]:
        sums = []
        for step, value in enumerate([1, 2, 3]):
            flags = {"sequence_id": sequence, "sequence_start": step == 0, "sequence_end": step == 2}
            request = {"inputs": [tensor("INPUT", "INT32", [value], [1, 1])], "parameters": flags}
            sums.append(post(server.http, f"/v2/models/{model}/infer", request).json()["outputs"][0]["data"][0])
        return sums

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(1, 9)))
    assert found == [[1, 3, last if model == "direct" else last + number] for number in range(8)]
