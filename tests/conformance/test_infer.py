"""Inference with tritonclient over both protocols: datatypes, outputs, classification, parameters, failures."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client, floats, ints, strings
from tests.conformance.raw import post
from tests.conftest import Server

VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 2**16 - 1], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([0.5, -65504], np.float16),
    "FP32": np.array([0.1, -np.inf, 3.4e38], np.float32),
    "FP64": np.array([0.1, 1e308], np.float64),
    "BF16": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "BYTES": strings(b"", b"\xff\x00 any bytes", "ä".encode()),
}
TEXTUAL = [name for name in VALUES if name not in ("FP16", "BF16")]
PAIR = {"INPUT0": np.arange(16, dtype=np.int32), "INPUT1": np.ones(16, np.int32)}


@pytest.mark.parametrize("datatype", VALUES)
def test_every_datatype_comes_back(client: Client, datatype: str) -> None:
    value = VALUES[datatype]
    result = client.infer("types", {f"IN_{datatype}": value}, datatypes={f"IN_{datatype}": datatype})
    assert result.datatypes == {f"OUT_{datatype}": datatype}
    assert result[f"OUT_{datatype}"].tolist() == value.tolist()


@pytest.mark.parametrize("datatype", TEXTUAL)
def test_every_datatype_comes_back_as_json(server: Server, datatype: str) -> None:
    client = Client("http", server)
    value = VALUES[datatype] if datatype != "BYTES" else strings("", "ä € 😀", '"\\\n')
    result = client.infer("types", {f"IN_{datatype}": value}, [f"OUT_{datatype}"], binary=False)
    assert result[f"OUT_{datatype}"].tolist() == value.tolist()


def test_all_datatypes_at_once(client: Client) -> None:
    result = client.infer(
        "types", {f"IN_{name}": value for name, value in VALUES.items()}, datatypes={"IN_BF16": "BF16"}
    )
    assert sorted(result.outputs) == sorted(f"OUT_{name}" for name in VALUES)


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_tensors_of_any_size(client: Client, count: int) -> None:
    value = np.arange(count, dtype=np.float32)
    assert client.infer("identity_fp32", {"INPUT": value})["OUTPUT"].tolist() == value.tolist()


def test_large_tensors(client: Client) -> None:
    value = np.arange(4_000_000, dtype=np.float32)
    assert np.array_equal(client.infer("identity_fp32", {"INPUT": value})["OUTPUT"], value)


def test_many_strings(client: Client) -> None:
    value = np.array([str(n) * (n % 7) for n in range(20_000)], dtype=np.object_)
    result = client.infer("types", {"IN_BYTES": value})["OUT_BYTES"]
    assert [v.decode() for v in result] == value.tolist()


def test_response_names_model_version_and_id(client: Client) -> None:
    result = client.infer("add_sub", PAIR, request_id="an id")
    assert (result.model_name, result.model_version, result.id) == ("add_sub", "1", "an id")
    assert list(result.outputs) == ["OUTPUT0", "OUTPUT1"]
    assert result["OUTPUT0"].tolist() == list(range(1, 17))
    assert result["OUTPUT1"].tolist() == list(range(-1, 15))


def test_only_outputs_asked_for_come_back(client: Client) -> None:
    assert list(client.infer("add_sub", PAIR, ["OUTPUT1"]).outputs) == ["OUTPUT1"]


@pytest.mark.parametrize(("asked", "served"), [("", "10"), ("1", "1"), ("2", "2"), ("10", "10")])
def test_version_asked_for_answers(client: Client, asked: str, served: str) -> None:
    result = client.infer("version_all", {"INPUT": strings("x")}, model_version=asked)
    assert result.model_version == served
    assert json.loads(result["FACTS"][0])["args"]["model_version"] == served


@pytest.mark.parametrize("rows", [1, 4])
def test_batches_keep_their_rows(client: Client, rows: int) -> None:
    a = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    result = client.infer("add_sub_fp32", {"INPUT0": a, "INPUT1": np.ones_like(a)})
    assert result["OUTPUT0"].tolist() == (a + 1).tolist()


@pytest.mark.parametrize(("given", "seen"), [("A", b"A"), ("AB", b"AB"), ("AC", b"AC"), ("ABC", b"ABC")])
def test_optional_inputs_may_be_absent(client: Client, given: str, seen: bytes) -> None:
    result = client.infer("optional", {name: floats(1).reshape(1, 1) for name in given})
    assert result["GIVEN"].tolist() == [[seen]]


def test_reshape_is_between_client_and_model(client: Client) -> None:
    matrix = np.zeros((2, 4, 3), np.float32)
    result = client.infer("reshape", {"SCALAR": np.zeros((2, 1), np.float32), "MATRIX": matrix}, ["SHAPES"])
    assert result["SHAPES"][0][0] == b"[2] [2, 2, 2, 3]"


def test_completed_model_answers(client: Client) -> None:
    value = floats(1, 2, 3, 4).reshape(1, 4)
    assert client.infer("auto_complete", {"INPUT": value})["OUTPUT"].tolist() == value.tolist()
    scaled = client.infer("auto_complete", {"INPUT": value, "SCALE": floats(2).reshape(1, 1)})
    assert scaled["OUTPUT"].tolist() == (value * 2).tolist()


def test_model_without_config_file_answers(client: Client) -> None:
    assert client.infer("no_config", {"INPUT": np.array([1, 2], np.int64)})["OUTPUT"].tolist() == [2, 3]


def test_classification_gives_the_largest_with_labels(client: Client) -> None:
    value = floats(0.1, 0.4, 0.3, 0.2, 4, 3, 2, 1).reshape(2, 4)
    result = client.infer("classify", {"INPUT": value}, ["OUTPUT"], classes=2)
    assert result["OUTPUT"].tolist() == [[b"0.400000:1:dog", b"0.300000:2"], [b"4.000000:0:cat", b"3.000000:1:dog"]]


def test_classification_of_integers(client: Client) -> None:
    result = client.infer("add_sub", PAIR, ["OUTPUT0"], classes=3)
    assert result["OUTPUT0"].tolist() == [b"16:15", b"15:14", b"14:13"]


def test_classification_of_an_ensemble_has_the_members_labels(client: Client) -> None:
    result = client.infer("labelled", {"IN": floats(1, 2, 3, 4).reshape(1, 4)}, ["OUT"], classes=1)
    assert result["OUT"].tolist() == [[b"4.000000:3:fish"]]


def seen_by_model(client: Client, **options: Any) -> dict[str, Any]:
    result = client.infer("echo_request", {"INPUT": strings("x")}, ["REQUEST"], **options)
    seen: dict[str, Any] = json.loads(result["REQUEST"][0])
    return seen


def test_model_sees_the_request(client: Client) -> None:
    seen = seen_by_model(client, request_id="r", timeout=5_000_000, parameters={"a": 1, "b": True, "c": "text"})
    assert seen == {
        "id": "r",
        "correlation_id": 0,
        "flags": 0,
        "timeout": 5_000_000,
        "parameters": {"a": 1, "b": True, "c": "text"},
        "outputs": ["REQUEST"],
        "cancelled": False,
    }


@pytest.mark.parametrize(("start", "end", "flags"), [(True, False, 1), (False, True, 2), (True, True, 3)])
@pytest.mark.parametrize("sequence", [42, "a-sequence"])
def test_model_sees_the_sequence(client: Client, sequence: int | str, start: bool, end: bool, flags: int) -> None:
    seen = seen_by_model(client, sequence_id=sequence, sequence_start=start, sequence_end=end)
    assert (seen["correlation_id"], seen["flags"]) == (sequence, flags)


def test_no_outputs_asked_for_means_all(client: Client) -> None:
    result = client.infer("echo_request", {"INPUT": strings("x")})
    assert sorted(json.loads(result["REQUEST"][0])["outputs"]) == ["REQUEST", "SPARE"]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: Client, algorithm: str) -> None:
    value = np.zeros(50_000, np.float32)
    options = (
        {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
        if client.protocol == "http"
        else {"compression_algorithm": algorithm}
    )
    assert np.array_equal(client.infer("identity_fp32", {"INPUT": value}, **options)["OUTPUT"], value)


@pytest.mark.parametrize(
    "code",
    ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"],
)
def test_errors_of_the_model_keep_their_code(client: Client, code: str) -> None:
    with client.refused(code, f"{code} fails"):
        client.infer("faults", {"MODE": strings(code).reshape(1, 1)})


def test_error_without_code_is_internal(client: Client) -> None:
    with client.refused("INTERNAL", "default fails"):
        client.infer("faults", {"MODE": strings("default").reshape(1, 1)})


def test_error_drops_outputs(client: Client) -> None:
    with client.refused("INTERNAL", "outputs are dropped"):
        client.infer("faults", {"MODE": strings("with_outputs").reshape(1, 1)})


FAILED = "Failed to process the request(s) for model 'faults_0', message: "


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("not_list", "Expected a list in the execute return, found type '<class 'str'>'."),
        (
            "not_response",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
        (
            "too_few",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
        (
            "too_many",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n",
        ),
    ],
)
def test_breaking_the_contract_of_execute_is_an_error(client: Client, mode: str, message: str) -> None:
    with client.refused("INTERNAL", FAILED + message):
        client.infer("faults", {"MODE": strings(mode).reshape(1, 1)})


def test_exception_in_execute_is_reported_with_its_place(client: Client, repository: Any) -> None:
    place = f"\n\nAt:\n  {repository}/faults/1/model.py(28): execute\n"
    with client.refused("INTERNAL", f"{FAILED}ValueError: execute raises{place}"):
        client.infer("faults", {"MODE": strings("raise").reshape(1, 1)})
    assert client.infer("faults", {"MODE": strings("ok").reshape(1, 1)})["OUTPUT"].tolist() == [[b"ok"]]


REFUSED = [
    ("add_sub", {"INPUT0": ints(*range(16))}, "[request id: x] expected 2 inputs but got 1 inputs for model 'add_sub'. "
     "Got input(s) ['INPUT0'], but missing required input(s) ['INPUT1']. Please provide all required input(s)."),
    ("add_sub", {"INPUT0": ints(1), "OTHER": ints(1)}, "unexpected inference input 'OTHER' for model 'add_sub'"),
    ("add_sub", PAIR | {"INPUT0": floats(*range(16))},
     "[request id: x] inference input 'INPUT0' data-type is 'FP32', but model 'add_sub' expects 'INT32'"),
    ("add_sub", PAIR | {"INPUT0": ints(1, 2)},
     "[request id: x] unexpected shape for input 'INPUT0' for model 'add_sub'. Expected [16], got [2]. "),
    ("identity_batched", {"INPUT": np.zeros((9, 1), np.float32)},
     "[request id: x] inference request batch-size must be <= 8 for 'identity_batched'"),
    ("identity_batched", {"INPUT": np.zeros((1, 1, 1), np.float32)},
     "[request id: x] unexpected shape for input 'INPUT' for model 'identity_batched'. Expected [-1,-1], got [1,1,1]. "
     "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
     "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
     "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."),
    ("add_sub_fp32", {"INPUT0": np.zeros((1, 16), np.float32), "INPUT1": np.zeros((2, 16), np.float32)},
     "[request id: x] input 'INPUT0' batch size does not match other inputs for 'add_sub_fp32'"),
    ("optional", {}, "[request id: x] expected number of inputs between 1 and 3 but got 0 inputs for model 'optional'. "
     "Got input(s) [], but missing required input(s) ['A']. Please provide all required input(s)."),
    ("accumulate", {"INPUT": ints(1).reshape(1, 1)},
     "inference request to model 'accumulate' must specify a non-zero or non-empty correlation ID"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "message"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_request_is_refused(client: Client, model: str, inputs: dict[str, np.ndarray], message: str) -> None:
    with client.refused("INVALID_ARG", message):
        client.infer(model, inputs, request_id="x")


def test_unknown_model_is_refused(client: Client) -> None:
    with client.refused("NOT_FOUND", "Request for unknown model: 'absent' is not found"):
        client.infer("absent", PAIR)


def test_unknown_version_is_refused(client: Client) -> None:
    with client.refused("NOT_FOUND", "Request for unknown model: 'add_sub' version 3 is not found"):
        client.infer("add_sub", PAIR, model_version="3")


def test_decoupled_model_is_refused_where_one_response_is_expected(client: Client) -> None:
    message = {
        "http": "HTTP end point doesn't support models with decoupled transaction policy",
        "grpc": "ModelInfer RPC doesn't support models with decoupled transaction policy",
    }[client.protocol]
    with client.refused("UNSUPPORTED", message):
        client.infer("repeat", {"IN": ints(1)})


def test_many_requests_at_once_all_answer_their_own(server: Server) -> None:
    client = tritonclient.http.InferenceServerClient(server.http, concurrency=16)
    futures = []
    for n in range(60):
        tensor = tritonclient.http.InferInput("INPUT", [1, 2], "FP32")
        tensor.set_data_from_numpy(floats(n, -n).reshape(1, 2))
        futures.append(client.async_infer("identity_batched", [tensor], request_id=str(n)))
    for n, future in enumerate(futures):
        result = future.get_result()
        assert result.get_response()["id"] == str(n)
        assert result.as_numpy("OUTPUT").tolist() == [[n, -n]]


def test_raw_binary_request(server: Server) -> None:
    reply = post(
        server.http, "/v2/models/identity_fp32/infer", floats(1, 2).tobytes(), {"Inference-Header-Content-Length": "0"}
    )
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.body[:length])["outputs"] == [
        {"name": "OUTPUT", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    ]
    assert np.frombuffer(reply.body[length:], np.float32).tolist() == [1, 2]


class TestEnsembles:
    def test_steps_in_sequence(self, client: Client) -> None:
        assert client.infer("chain", {"X": floats(1, 2).reshape(2, 1)})["Y"].tolist() == [[3], [4]]

    def test_parallel_branches_join(self, client: Client) -> None:
        result = client.infer("diamond", {"X": floats(1, 2).reshape(1, 2)})
        assert result["P"].tolist() == [[2, 3]]
        assert result["Y"].tolist() == [[4, 6]]

    def test_batching_and_non_batching_members(self, client: Client) -> None:
        assert client.infer("mixed", {"X": floats(1, 2, 3)})["Y"].tolist() == [4, 5, 6]

    @pytest.mark.parametrize(("given", "sum_"), [("X", 1), ("XB", 2)])
    def test_optional_tensor_may_be_absent(self, client: Client, given: str, sum_: float) -> None:
        result = client.infer("optional_chain", {name: floats(1).reshape(1, 1) for name in given})
        assert result["Y"].tolist() == [[sum_]]

    def test_error_of_a_member_ends_the_request(self, client: Client) -> None:
        with client.refused("NOT_FOUND", "in ensemble 'failing', NOT_FOUND fails"):
            client.infer("failing", {"MODE": strings("NOT_FOUND").reshape(1, 1)})

    def test_output_that_a_member_leaves_out_is_missed_by_the_next(self, client: Client) -> None:
        message = (
            "in ensemble 'failing', [request id: e] expected 1 inputs but got 0 inputs for model 'identity_string'. "
            "Got input(s) [], but missing required input(s) ['TEXT']. Please provide all required input(s)."
        )
        with client.refused("INVALID_ARG", message):
            client.infer("failing", {"MODE": strings("no_outputs").reshape(1, 1)}, request_id="e")

    def test_members_see_the_request(self, client: Client) -> None:
        result = client.infer(
            "echo_chain", {"IN": strings("x")}, request_id="e", timeout=9_000_000, sequence_id=5, parameters={"a": 1}
        )
        for name in ("FIRST", "SECOND"):
            seen = json.loads(result[name][0])
            assert (seen["id"], seen["timeout"], seen["correlation_id"]) == ("e", 9_000_000, 5)
            assert seen["parameters"] == {"a": 1}
            assert seen["outputs"] == ["REQUEST"]


class TestSequences:
    @pytest.mark.parametrize("model", ["accumulate", "accumulate_state"])
    def test_sequences_are_kept_apart(self, client: Client, model: str, server_kind: str) -> None:
        if (server_kind, model) == ("triton", "accumulate_state"):
            pytest.skip("Triton's Python backend drops the state that a model gives back")
        sums: dict[int, list[int]] = {101: [], 102: []}
        for step in range(1, 4):
            for sequence in sums:
                result = client.infer(
                    model,
                    {"INPUT": ints(step * sequence).reshape(1, 1)},
                    sequence_id=sequence,
                    sequence_start=step == 1,
                    sequence_end=step == 3,
                )
                sums[sequence].append(int(result["OUTPUT"][0][0]))
        assert sums == {101: [101, 303, 606], 102: [102, 306, 612]}

    def test_first_request_must_start_the_sequence(self, client: Client) -> None:
        message = (
            "inference request for sequence 55 to model 'accumulate' must specify the START flag on the first request "
            "of the sequence"
        )
        with client.refused("INVALID_ARG", message):
            client.infer("accumulate", {"INPUT": ints(1).reshape(1, 1)}, sequence_id=55)

    def test_starting_again_restarts(self, client: Client) -> None:
        def send(value: int, **flags: bool) -> int:
            result = client.infer("accumulate", {"INPUT": ints(value).reshape(1, 1)}, sequence_id=77, **flags)
            return int(result["OUTPUT"][0][0])

        assert send(5, sequence_start=True) == 5
        assert send(1) == 6
        assert send(2, sequence_start=True) == 2
        assert send(2, sequence_end=True) == 4
