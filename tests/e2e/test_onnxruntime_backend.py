"""ONNX and OpenVINO graphs in a repository, served without a configuration, driven by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper

from tests import onnx_graphs
from tests.conformance.raw import get, post, tensor
from tests.e2e.processes import workers
from tests.servers import ConchServer

#: Two requests share a batch however slowly they arrive; the delay is longer than any test.
RAGGED = """
backend: "onnxruntime" max_batch_size: 2
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output [ { name: "y" data_type: TYPE_FP32 dims: -1 }, { name: "totals" data_type: TYPE_FP32 dims: 1 reshape { } } ]
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ends" data_type: TYPE_INT32 source_input: "x"
}
batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
dynamic_batching { max_queue_delay_microseconds: 60000000 }
"""


def _fill(repository: Path) -> None:
    onnx_graphs.add_sub(repository / "add_sub" / "1" / "model.onnx")
    onnx_graphs.identity(repository / "strings" / "1" / "model.onnx", "BYTES", ("batch", 1))
    onnx_graphs.identity(repository / "bfloat16" / "1" / "model.onnx", "BF16", ("batch", "width"))
    onnx_graphs.identity(repository / "scalar" / "1" / "model.onnx", "FP32", ("batch",))
    onnx_graphs.write(
        repository / "failing" / "1" / "model.onnx",
        [helper.make_node("Add", ["a", "b"], ["sum"])],
        [(name, "FP32", ("batch", "width")) for name in "ab"],
        [("sum", "FP32", ("batch", "width"))],
    )
    _total(repository / "total")
    source = onnx_graphs.add_sub(repository.parent / "source.onnx")
    (repository / "add_sub_openvino" / "1").mkdir(parents=True)
    openvino.save_model(openvino.Core().read_model(source), repository / "add_sub_openvino" / "1" / "model.xml")
    onnx_graphs.ragged(repository / "ragged" / "1" / "model.onnx")
    (repository / "ragged" / "config.pbtxt").write_text(RAGGED)
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"not a graph")
    onnx_graphs.add_sub(repository / "disagreeing" / "1" / "model.onnx")
    (repository / "disagreeing" / "config.pbtxt").write_text(
        """
        backend: "onnxruntime" max_batch_size: 8
        input [ { name: "a" data_type: TYPE_INT64 dims: 4 }, { name: "b" data_type: TYPE_FP32 dims: 4 } ]
        output { name: "sum" data_type: TYPE_FP32 dims: 4 }
        """
    )


def _total(model: Path) -> None:
    """``y`` is the sum of the numbers of a sequence, which the server keeps; rows that are not ready give 0."""
    onnx_graphs.write(
        model / "1" / "model.onnx",
        [
            helper.make_node("Add", ["x", "before"], ["sum"]),
            helper.make_node("Mul", ["sum", "ready"], ["y"]),
            helper.make_node("Identity", ["sum"], ["after"]),
        ],
        [(name, "FP32", ("batch", 1)) for name in ("x", "before", "ready")],
        [(name, "FP32", ("batch", 1)) for name in ("y", "after")],
    )
    (model / "config.pbtxt").write_text(
        """
        backend: "onnxruntime" max_batch_size: 4
        sequence_batching {
          control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
          state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: 1 }
          max_sequence_idle_microseconds: 60000000
        }
        """
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("onnx")
    _fill(folder / "models")
    flags = ("--exit-on-error=false", "--strict-readiness=false", "--backend-config=default-max-batch-size=16")
    with ConchServer(folder / "models", *flags, log=folder / "server.log") as server:
        yield server


@pytest.fixture
def client(server: ConchServer) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


def _input(name: str, array: Any, datatype: str, client: Any = httpclient) -> Any:
    found = client.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


@pytest.mark.parametrize(("model", "backend"), [("add_sub", "onnxruntime"), ("add_sub_openvino", "openvino")])
def test_a_graph_is_its_own_configuration(server: ConchServer, model: str, backend: str) -> None:
    config = get(server.http, f"/v2/models/{model}/config").json()
    assert config["backend"] == backend
    assert config["max_batch_size"] == 16
    assert config["dynamic_batching"]["preferred_batch_size"] == [16]
    assert [one["name"] for one in config["input"]] == ["a", "b"]
    metadata = get(server.http, f"/v2/models/{model}").json()
    assert metadata["outputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in ("sum", "difference")
    ]


@pytest.mark.parametrize("model", ["add_sub", "add_sub_openvino"])
def test_both_protocols_answer_with_the_outputs_asked_for(server: ConchServer, model: str) -> None:
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    for library, address in ((httpclient, server.http), (grpcclient, server.grpc)):
        with library.InferenceServerClient(address) as client:
            inputs = [_input("a", a, "FP32", library), _input("b", b, "FP32", library)]
            result = client.infer(model, inputs)
            np.testing.assert_array_equal(result.as_numpy("sum"), a + b)
            np.testing.assert_array_equal(result.as_numpy("difference"), a - b)
            result = client.infer(model, inputs, outputs=[library.InferRequestedOutput("difference")])
            assert result.as_numpy("sum") is None


@pytest.mark.parametrize("model", ["add_sub", "add_sub_openvino"])
def test_requests_at_once_each_get_their_own_rows(server: ConchServer, model: str) -> None:
    def ask(number: int) -> bool:
        rows = number % 3 + 1
        with httpclient.InferenceServerClient(server.http) as client:
            a = np.full((rows, 4), number, np.float32)
            for _ in range(10):
                total = client.infer(model, [_input("a", a, "FP32"), _input("b", a, "FP32")]).as_numpy("sum")
                if total.shape != (rows, 4) or not (total == 2 * number).all():
                    return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))


def test_requests_of_other_shapes_share_a_batch(server: ConchServer) -> None:
    def ask(width: int) -> Any:
        inputs = [tensor("x", "FP32", range(1, width + 1), [1, width])]
        return post(server.http, "/v2/models/ragged/infer", {"inputs": inputs}).json()["outputs"]

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(ask, (1, 3)))
    assert [[output["data"] for output in outputs] for outputs in replies] == [[[2], [1]], [[2, 4, 6], [6]]]
    assert [[output["shape"] for output in outputs] for outputs in replies] == [[[1, 1], [1, 1]], [[1, 3], [1, 1]]]
    [statistics] = get(server.http, "/v2/models/ragged/stats").json()["model_stats"]
    assert statistics["execution_count"] == 1


def test_strings_pass(client: httpclient.InferenceServerClient) -> None:
    x = np.array([["plain"], ["ü€ 漢字"], [""]], object)
    found = client.infer("strings", [_input("x", x, "BYTES")]).as_numpy("y")
    assert [element.decode() for element in found.ravel()] == x.ravel().tolist()


def test_a_string_that_is_not_utf8_is_refused(client: httpclient.InferenceServerClient) -> None:
    with pytest.raises(httpclient.InferenceServerException, match="input 'x' is not valid UTF-8: element 0, byte 1"):
        client.infer("strings", [_input("x", np.array([[b"a\xff"]], object), "BYTES")])
    assert client.infer("strings", [_input("x", np.array([["b"]], object), "BYTES")])


def test_bfloat16_passes(client: httpclient.InferenceServerClient) -> None:
    x = np.array([[1.5, -2.0, 0.0]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(client.infer("bfloat16", [_input("x", x, "BF16")]).as_numpy("y"), x)


def test_one_number_for_each_row_is_a_dimension_of_one(server: ConchServer) -> None:
    reply = post(server.http, "/v2/models/scalar/infer", {"inputs": [tensor("x", "FP32", [2.5, 3.5], [2, 1])]})
    assert reply.status == 200, reply.body
    assert (reply.json()["outputs"][0]["shape"], reply.json()["outputs"][0]["data"]) == ([2, 1], [2.5, 3.5])


def test_what_a_graph_refuses_fails_one_request(server: ConchServer) -> None:
    def ask(width: int) -> Any:
        inputs = [tensor("a", "FP32", [1.0] * 3, [1, 3]), tensor("b", "FP32", [1.0] * width, [1, width])]
        return post(server.http, "/v2/models/failing/infer", {"inputs": inputs})

    reply = ask(2)
    assert reply.status == 500
    assert "onnx runtime error 1: Non-zero status code returned while running Add node" in reply.error
    assert ask(3).status == 200


def test_models_that_cannot_load_say_why(server: ConchServer) -> None:
    index = post(server.http, "/v2/repository/index", {}).json()
    reasons = {one["name"]: one.get("reason", "") for one in index}
    assert "onnx runtime error 7: Load model from" in reasons["broken"]
    assert "configuration expects datatype TYPE_INT64 for input 'a', model provides TYPE_FP32" in reasons["disagreeing"]
    assert get(server.http, "/v2/models/add_sub/ready").status == 200


def test_instances_are_threads_of_one_worker_that_has_no_torch(server: ConchServer) -> None:
    config = get(server.http, "/v2/models/add_sub/config").json()
    assert config["instance_group"][0]["count"] == 2
    served = [one for one in post(server.http, "/v2/repository/index", {}).json() if one.get("state") == "READY"]
    found = workers(server)
    assert len(found) == len(served)
    for worker in found:
        assert not [one.path for one in psutil.Process(worker.pid).memory_maps() if "libtorch" in one.path]


def test_sequences_have_states_of_their_own_that_clients_do_not_see(client: httpclient.InferenceServerClient) -> None:
    assert [one["name"] for one in client.get_model_metadata("total")["inputs"]] == ["x"]
    sums: dict[int, list[float]] = {1: [], 2: []}
    for step in range(3):
        for sequence, values in sums.items():
            result = client.infer(
                "total",
                [_input("x", np.array([[sequence]], np.float32), "FP32")],
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == 2,
            )
            assert [output["name"] for output in result.get_response()["outputs"]] == ["y"]
            values.append(result.as_numpy("y").item())
    assert sums == {1: [1, 2, 3], 2: [2, 4, 6]}
