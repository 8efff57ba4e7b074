"""Remote models of conch, run by another conch and by the real Triton, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.calls import call
from tests.conformance.clients import Client, floats, ints, strings
from tests.conformance.grpc_cases import EMPTY_FINAL, Call, infer, repeat, request, square, tensor
from tests.conformance.raw import Reply, get, post
from tests.conformance.raw import tensor as json_tensor
from tests.conftest import TOLERANT, Server
from tests.events import Events
from tests.models import build, write
from tests.servers import ConchServer

#: Remote models over both protocols, as ``NAME_http`` and ``NAME_grpc``.
BOTH = ("types", "identity_batched", "echo_request", "accumulate", "gate", "faults", "optional")
#: Remote models over gRPC with their own names: used by ensembles and models of the server in front.
OWN = ("repeat", "square", "plus_one", "accumulate", "identity_string")
#: Ensembles and models of the server in front that use them.
IN_FRONT = ("accumulate_chain", "calling_async", "calling_decoupled")


def remote(url: str, **parameters: object) -> str:
    """Return the text of a configuration."""
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in {"url": url, **parameters}.items()
    ]
    return "\n".join(['backend: "remote"', *lines])


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    """conch in front of the server under test."""
    repository = build(tmp_path_factory.mktemp("front") / "models", *IN_FRONT)
    for name in BOTH:
        write(repository, f"{name}_http", remote(f"http://{server.http}", model=name))
        write(repository, f"{name}_grpc", remote(f"grpc://{server.grpc}", model=name))
    for name in OWN:
        write(repository, name, remote(f"grpc://{server.grpc}"))
    labels = {"labels.txt": "ant\nbee\ncat\ndog\n"}
    outputs = 'output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }'
    inputs = 'max_batch_size: 8 input { name: "INPUT" data_type: TYPE_FP32 dims: [ 4 ] }'
    write(repository, "classify", "\n".join([remote(f"grpc://{server.grpc}"), inputs, outputs]), labels)
    write(repository, "streamed_http", remote(f"http://{server.http}", model="repeat"))
    write(repository, "nobody", remote(f"grpc://{server.grpc}, http://{server.http}", model="nobody"))
    log = tmp_path_factory.mktemp("logs") / "front.log"
    with ConchServer(repository, *TOLERANT, log=log) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def over(request: pytest.FixtureRequest) -> str:
    """The protocol between the two servers."""
    protocol: str = request.param
    return protocol


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, front: ConchServer) -> Client:
    """tritonclient of the server in front."""
    return Client(request.param, front)


ARRAYS = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([0.5, np.inf], np.float16),
    "FP32": np.array([], np.float32),
    "FP64": np.array([1e300, -0.0], np.float64),
    "BYTES": np.array([b"", b"\xff\x00", "ä".encode()], np.object_),
}


def test_tensors_of_all_types_come_back_as_they_were(client: Client, over: str) -> None:
    inputs = {f"IN_{datatype}": value for datatype, value in ARRAYS.items()}
    result = client.infer(f"types_{over}", inputs, [f"OUT_{datatype}" for datatype in ARRAYS], request_id="all")
    assert (result.model_name, result.id) == (f"types_{over}", "all")
    for datatype, value in ARRAYS.items():
        given = result[f"OUT_{datatype}"]
        assert (given.shape, given.tolist()) == (value.shape, value.tolist()), datatype


def test_bf16_comes_back_as_it_was(front: ConchServer, over: str) -> None:
    bits = bytes.fromhex("803f00c0")
    raw = infer(f"types_{over}", [tensor("IN_BF16", "BF16", [2])], [bits])
    (message,) = call(front.grpc, raw).messages
    given = {output.name: data for output, data in zip(message.outputs, message.raw_output_contents, strict=True)}
    assert given["OUT_BF16"] == bits


def test_batches_of_any_size_are_passed_on(client: Client, over: str) -> None:
    for value in (np.zeros((8, 0), np.float32), np.ones((1, 400_000), np.float32), floats(1, 2).reshape(2, 1)):
        result = client.infer(f"identity_batched_{over}", {"INPUT": value}, ["OUTPUT"])
        assert result["OUTPUT"].shape == value.shape
        assert np.array_equal(result["OUTPUT"], value)


def test_the_remote_sees_the_request_as_its_own_clients_send_it(server: Server, front: ConchServer, over: str) -> None:
    body = {
        "id": "seven",
        "inputs": [json_tensor("INPUT", "BYTES", ["x"], [1])],
        "outputs": [{"name": "REQUEST"}],
        "parameters": {
            "text": "ä", "yes": True, "whole": -3, "half": 0.5,
            "sequence_id": "story", "sequence_start": True, "sequence_end": True, "timeout": 40_000_000,
        },
    }  # fmt: skip
    direct = post(server.http, "/v2/models/echo_request/infer", body)
    assert seen(post(front.http, f"/v2/models/echo_request_{over}/infer", body)) == seen(direct)


def seen(reply: Reply) -> Any:
    """Return the request that the model ``echo_request`` received; the order of parameters is undefined."""
    (output,) = reply.json()["outputs"]
    return json.loads(output["data"][0])


def test_sequences_are_added_up(front: ConchServer, over: str) -> None:
    steps: list[tuple[int, dict[str, bool]]] = [(1, {"sequence_start": True}), (2, {}), (3, {"sequence_end": True})]
    sequence = 2**63 + 9
    sums = [add(front, f"accumulate_{over}", sequence, number, **flags) for number, flags in steps]
    assert [reply.json()["outputs"][0]["data"] for reply in sums] == [[1], [3], [6]]
    late = add(front, f"accumulate_{over}", sequence, 4)
    assert (late.status, "START flag" in late.error) == (400, True)


def add(front: ConchServer, model: str, sequence: int, number: int, **parameters: Any) -> Reply:
    body = {
        "inputs": [json_tensor("INPUT", "INT32", [number], [1, 1])],
        "outputs": [{"name": "OUTPUT"}],
        "parameters": {"sequence_id": sequence, **parameters},
    }
    return post(front.http, f"/v2/models/{model}/infer", body)


def stream(server: Server, *requests: Any) -> list[tuple[list[bytes], bool]]:
    """Return the data and the final flag of each response of one stream, which must end without an error."""
    outcome = call(server.grpc, Call("ModelStreamInfer", list(requests)))
    assert outcome.code == "OK", outcome.details
    return [
        (
            list(message.infer_response.raw_output_contents),
            message.infer_response.parameters["triton_final_response"].bool_param,
        )
        for message in outcome.messages
    ]


def test_responses_of_a_decoupled_model_and_its_end_are_passed_on(server: Server, front: ConchServer) -> None:
    for requests in (
        [repeat(4, 2, 0, id="r", parameters=EMPTY_FINAL)],
        [repeat(parameters=EMPTY_FINAL)],
        [square(3, parameters=EMPTY_FINAL)],
        [repeat(7)],
    ):
        assert stream(front, *requests) == stream(server, *requests)


def test_an_error_of_a_decoupled_model_keeps_its_code_where_that_is_reported(
    front: ConchServer, server_kind: str
) -> None:
    metadata = (("triton_grpc_error", "true"),)
    outcome = call(front.grpc, Call("ModelStreamInfer", [repeat(1, -1)], metadata))
    code = "INVALID_ARGUMENT" if server_kind == "conch" else "UNKNOWN"  # Triton would crash if asked for it
    assert (outcome.code, outcome.details) == (code, "negative")


def test_a_decoupled_model_needs_grpc(front: ConchServer) -> None:
    index = {entry["name"]: entry for entry in post(front.http, "/v2/repository/index", {}).json()}
    assert index["streamed_http"]["state"] == "UNAVAILABLE"
    assert (
        "'streamed_http' is decoupled, and its responses can be forwarded only over gRPC"
        in (index["streamed_http"]["reason"])
    )


def test_a_model_that_does_not_exist_is_said_to_be_missing(front: ConchServer) -> None:
    index = {entry["name"]: entry for entry in post(front.http, "/v2/repository/index", {}).json()}
    assert index["nobody"]["reason"].count("it has no model 'nobody'") == 2
    assert get(front.http, "/v2/models/nobody/ready").status == 400


def test_errors_keep_their_code_and_message(client: Client, over: str, tmp_path: Path) -> None:
    with client.refused("NOT_FOUND", "fail here"):
        inputs = {"EVENTS": strings(str(tmp_path)).reshape(1, 1), "NAME": strings("fail here").reshape(1, 1)}
        (tmp_path / "fail here.go").touch()
        client.infer(f"gate_{over}", inputs)


def test_an_abandoned_request_is_cancelled_on_the_remote_server(
    front: ConchServer, over: str, events: Events, server_kind: str
) -> None:
    inputs = [
        tensor("EVENTS", "BYTES", [1, 1], bytes_contents=[str(events.folder).encode()]),
        tensor("NAME", "BYTES", [1, 1], bytes_contents=[b"leaving"]),
    ]
    with grpc.insecure_channel(front.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        waiting = stub.ModelInfer.future(request(f"gate_{over}", inputs))
        events.wait("leaving.started")
        waiting.cancel()
        if over == "http" and server_kind == "triton":
            events.set("leaving.go")  # its HTTP front end does not detect disconnected clients
        else:
            events.wait("leaving.cancelled")


def test_classes_have_the_labels_of_the_server_in_front(client: Client) -> None:
    result = client.infer("classify", {"INPUT": floats(0, 3, 1, 2).reshape(1, 4)}, ["OUTPUT"], classes=2)
    assert result["OUTPUT"].tolist() == [[b"3.000000:1:bee", b"2.000000:3:dog"]]


def test_an_ensemble_has_a_remote_step(front: ConchServer) -> None:
    for number, total, flags in ((5, 5, {"sequence_start": True}), (6, 11, {"sequence_end": True})):
        body = {
            "inputs": [json_tensor("NUMBER", "INT32", [number], [1, 1])],
            "parameters": {"sequence_id": 21, **flags},
        }
        reply = post(front.http, "/v2/models/accumulate_chain/infer", body)
        assert reply.json()["outputs"][0]["data"] == [total]


def test_a_model_calls_remote_models(client: Client) -> None:
    result = client.infer("calling_async", {"X": ints(3)})
    assert result["RESULT"].tolist() == [1, 2, 3, 0, 1, 2]


def test_a_decoupled_model_passes_responses_of_a_remote_one_on(front: ConchServer) -> None:
    requests = [request("calling_decoupled", [tensor("IN", "INT32", [2])], [ints(8, 9).tobytes()])]
    assert [data for data, _ in stream(front, *requests)] == [[ints(8).tobytes()], [ints(9).tobytes()]]


def test_requests_are_counted(front: ConchServer) -> None:
    body = {"inputs": [json_tensor("X", "FP32", [1, 2], [2, 1])]}
    assert post(front.http, "/v2/models/plus_one/infer", body).json()["outputs"][0]["data"] == [2, 3]
    (entry,) = get(front.http, "/v2/models/plus_one/stats").json()["model_stats"]
    stats = entry["inference_stats"]
    assert entry["inference_count"] >= 2
    assert entry["execution_count"] == stats["success"]["count"]
    assert 0 < stats["compute_infer"]["ns"] <= stats["success"]["ns"]
