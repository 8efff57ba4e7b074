"""The API for a ``model.py`` written for Triton: utilities, environment, senders, batches, async execute."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import Client, floats, ints, strings
from tests.conformance.conftest import pass_gate, wait_for_pending
from tests.conformance.raw import get
from tests.conftest import Server
from tests.events import Events

RAISED = "TritonModelException"
METRIC = "Failed to process the request for model 'utilities_0', message: TRITONSERVER_METRIC_KIND_COUNTER"
BLS = "Error when running inference"

#: The result of each function of the model ``utilities``.
UTILITIES: dict[str, Any] = {
    "tensor_accessors": ["T", [2, 3], True, [[0, 1, 2], [3, 4, 5]]],
    "tensor_of_objects": [[2, 2], ["ä", "b'b'", "1", "None"]],
    "tensor_of_bytes": [[2], ["b'a'", "b'bc'"]],
    "input_strings_are_bytes": ["object", "bytes"],
    "tensor_not_contiguous": [[3, 2], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]],
    "tensor_without_name": [RAISED, "Tensor name cannot be an empty string."],
    "tensor_of_unsupported_type": [RAISED, "NumPy dtype is not supported."],
    "tensor_of_unicode": [RAISED, "NumPy dtype is not supported."],
    "dlpack_round_trip": ["U", [2, 2], [[0.0, 1.0], [2.0, 3.0]], [1, 0]],
    "dlpack_into_numpy": [0.0, 1.0, 2.0],
    "dlpack_of_strings": [RAISED, "DLPack does not have support for string tensors."],
    "dlpack_not_contiguous": [
        RAISED,
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported.",
    ],
    "type_conversions": [
        [
            "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
            "float64", "object",
        ],
        [1, 2, 9, 10, 11, 13],
        "float64",
        "object",
        ["KeyError", "'TYPE_BF16'"],
        [
            "TYPE_BOOL", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_INT8",
            "TYPE_STRING", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_UINT8",
        ],
    ],
    "constants": [1, 2, 1, 1, 2, 1, 0],
    "error_codes": [[True] * 8, "plain", True, True],
    "config_helpers": [
        {
            "name": "CASE",
            "data_type": "TYPE_STRING",
            "format": "FORMAT_NONE",
            "dims": [1],
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": False,
            "is_non_linear_format_io": False,
        },
        None,
        "TYPE_STRING",
        False,
    ],
    "tensors_by_name": ["CASE", True, "A", True],
    "byte_serialisation": ["02000000616202000000c3a4", ["ab", "ä"]],
    "request_built_by_hand": ["r", "text", 2, 5, {"a": 1, "b": True, "c": "d"}, ["O"], ["I"], False],
    "request_refuses_bad_arguments": [
        [RAISED, "Correlation ID must be integer or string"],
        [RAISED, "Expect parameters keys to have type str, found type <class 'int'>"],
        [RAISED, "Expect parameters values to have type bool/int/str, found type <class 'list'>"],
        [RAISED, "Input tensor for request with id 'r' and model name 'm' should not be empty."],
    ],
    "refused_arguments": [
        41,
        {
            "request requested_output_names ['']": "Requested output name for request with id 'r' and model name 'm' "
            "should not be empty.",
            "request correlation_id -1": "RuntimeError",
            "request correlation_id 18446744073709551616": "RuntimeError",
            "request parameters {'a': None}": "Expect parameters values to have type bool/int/str, found type "
            "<class 'NoneType'>",
            "dlpack of a number": "Provided tensor is not supported. Tensor must be a DLPack capsule         or have "
            "`__dlpack__` and `__dlpack_device__` attributes",
            "sent with other flags": "Unable to send response. Unsupported flag provided.",
            "files": "failed to load model 'x', files should be a dictionary of file paths and file contents",
        },
    ],
    "response_accessors": [
        ["A"], False, True, True, "broken", [RAISED, "Output tensor for inference response should not be empty."],
    ],
    "logger_levels": None,
    "metrics": [2.5, 6.0],
    "metrics_refuse_wrong_operations": [
        [RAISED, f"Failed to set metric value: {METRIC} does not support Set"],
        [
            RAISED,
            f"Failed to increment metric value: {METRIC} can only be incremented monotonically by non-negative values.",
        ],
        [RAISED, "Failed to create metric. Labels must be a dictionary."],
    ],
    "bls": [["OUTPUT0"], list(range(1, 17))],
    "bls_errors": [
        f"Model absent - {BLS}: Failed for execute the inference request. Model 'absent' is not ready.",
        f"Model add_sub - {BLS}: [request id: inner] expected 2 inputs but got 1 inputs for model 'add_sub'. Got "
        "input(s) ['IN'], but missing required input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
        f"Model repeat - {BLS}: Model repeat is using the decoupled. The current BLS request call doesn't support "
        "models using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
        "'async_exec' calls for decoupled models.'",
    ],
    "bls_decoupled": [[[4]], [[2]], []],
    "models_ready": [True, True, False, False],
    "bls_in_initialize": [RAISED, "BLS is only supported during the 'execute' function."],
}  # fmt: skip


@pytest.fixture
def http(server: Server) -> Client:
    return Client("http", server)


@pytest.mark.parametrize("case", UTILITIES)
def test_utilities(http: Client, case: str, server_kind: str) -> None:
    if (server_kind, case) == ("triton", "metrics_refuse_wrong_operations"):
        pytest.skip("2.51 gives these answers, and now and then dies of them")
    expected = UTILITIES[case]
    if (server_kind, case) == ("conch", "tensor_of_unicode"):
        expected = None  # conch accepts arrays of str, encoded as UTF-8
    result = http.infer("utilities", {"CASE": strings(case)})
    assert json.loads(result["RESULT"][0]) == expected


def test_custom_metrics_are_on_the_metrics_page(http: Client, server: Server) -> None:
    http.infer("utilities", {"CASE": strings("metrics")})
    page = get(server.metrics, "/metrics").body.decode()
    assert "# HELP toy_counter Counts\n# TYPE toy_counter counter\n" in page
    assert '\ntoy_counter{model="utilities"} ' in page
    assert "\ntoy_gauge 6" in page


def test_arguments_of_initialize(http: Client, repository: Path) -> None:
    facts = json.loads(http.infer("version_latest", {"INPUT": strings("x")})["FACTS"][0])
    arguments = facts["args"]
    config = json.loads(arguments.pop("model_config"))
    assert arguments == {
        "model_instance_kind": "CPU",
        "model_instance_name": "version_latest_0",
        "model_instance_device_id": "0",
        "model_repository": str(repository / "version_latest"),
        "model_version": "3",
        "model_name": "version_latest",
    }
    assert facts["types"] == ["str"]
    assert config["input"][0]["name"] == "INPUT"
    assert get(http_address(http), "/v2/models/version_latest/config").json() == config


def http_address(client: Client) -> str:
    return client.server.http


def test_surroundings_of_a_model(http: Client, repository: Path) -> None:
    facts = json.loads(http.infer("version_latest", {"INPUT": strings("x")})["FACTS"][0])
    assert facts["model_dir"] == str(repository / "version_latest" / "3")
    assert facts["module"] == "3.model"
    places = [facts["path"].index(str(repository / "version_latest" / end).rstrip("/")) for end in ("3", "")]
    assert places == sorted(places)


def test_instances_are_named_after_their_groups(http: Client) -> None:
    seen = set()
    for _ in range(60):
        facts = json.loads(http.infer("instances", {"INPUT": strings("x")})["FACTS"][0])
        seen.add(facts["args"]["model_instance_name"])
    assert seen <= {"instances_0_0", "instances_0_1", "other_0"}
    assert len(seen) >= 2


def test_helper_modules_of_two_models_do_not_mix(http: Client) -> None:
    for name in "ab":
        result = http.infer(f"module_{name}", {"INPUT": strings("x")})
        assert result["OUTPUT"].tolist() == [f"helper of {name}, shared helper of {name}".encode()]


@pytest.mark.parametrize(
    ("mode", "answer"),
    [
        ("returned", b"returned"),
        ("direct", b"direct"),
        ("thread", b"thread"),
        ("late_final", b"late_final"),
        ("twice", b"twice"),
        ("closed", b"closed"),
        ("bad_flag", b"Unable to send response. Unsupported flag provided."),
        ("no_response", b"Inference Response object must be provided when the response flags is set to zero."),
        (
            "final_first",
            b"Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
        ),
    ],
)
def test_response_sender_of_a_non_decoupled_model(client: Client, mode: str, answer: bytes) -> None:
    assert client.infer("sender", {"MODE": strings(mode)})["OUTPUT"].tolist() == [answer]


def test_error_by_response_sender(client: Client) -> None:
    with client.refused("UNSUPPORTED", "sent an error"):
        client.infer("sender", {"MODE": strings("error")})


def test_async_execute(client: Client) -> None:
    assert client.infer("asynchronous", {"INPUT": floats(1, 2).reshape(2, 1)})["OUTPUT"].tolist() == [[1], [2]]


def test_exception_in_async_execute_fails_the_request(client: Client) -> None:
    with pytest.raises(Exception, match=r"^(\[.*\] )?Failed to process the request\(s\) for model 'asynchronous_0'"):
        client.infer("asynchronous", {"INPUT": floats(-1).reshape(1, 1)})
    assert client.infer("asynchronous", {"INPUT": floats(3).reshape(1, 1)})["OUTPUT"].tolist() == [[3]]


Background = Callable[..., Future[Any]]


class TestBatches:
    """A first request occupies the model's only instance, so that the following requests form one batch."""

    def hold(self, server: Server, events: Events, background: Background, *names: str) -> list[Future[Any]]:
        first = background(pass_gate, server, events, "first")
        events.wait("first.started")
        futures = [first]
        for count, name in enumerate(names, 1):
            futures.append(background(pass_gate, server, events, name))
            wait_for_pending(server, "gate", count)
        return futures

    def test_waiting_requests_run_as_one_batch(self, server: Server, events: Events, background: Background) -> None:
        futures = self.hold(server, events, background, "a", "b", "c")
        assert not events.happened("a.started")
        events.set("first.go", "a.go", "b.go", "c.go")
        replies = [future.result().json() for future in futures]
        assert [reply["outputs"][0]["data"] for reply in replies] == [["first"], ["a"], ["b"], ["c"]]
        assert [reply["outputs"][1]["data"] for reply in replies] == [[1], [3], [3], [3]]

    def test_batch_is_bounded_by_max_batch_size(self, server: Server, events: Events, background: Background) -> None:
        names = [f"n{n}" for n in range(6)]
        futures = self.hold(server, events, background, *names)
        events.set("first.go", *(f"{name}.go" for name in names))
        sizes = [future.result().json()["outputs"][1]["data"] for future in futures]
        assert sizes == [[1], [4], [4], [4], [4], [2], [2]]

    def test_error_of_one_request_is_its_own(self, server: Server, events: Events, background: Background) -> None:
        futures = self.hold(server, events, background, "a", "fail", "b")
        events.set("first.go", "a.go", "fail.go", "b.go")
        replies = [future.result() for future in futures]
        assert [reply.status for reply in replies] == [200, 200, 404, 200]
        assert replies[2].error == "fail"

    def test_exception_fails_the_whole_batch_and_no_other(
        self, server: Server, events: Events, background: Background
    ) -> None:
        futures = self.hold(server, events, background, "a", "raise", "b")
        events.set("first.go", "a.go", "raise.go", "b.go")
        replies = [future.result() for future in futures]
        assert [reply.status for reply in replies] == [200, 500, 500, 500]
        assert all("ValueError: told to raise" in reply.error for reply in replies[1:])

    def test_full_queue_refuses_at_once(self, server: Server, events: Events, background: Background) -> None:
        model = "gate_bounded"
        running = background(pass_gate, server, events, "running", model)
        events.wait("running.started")
        waiting = []
        for count, name in enumerate(("a", "b"), 1):
            waiting.append(background(pass_gate, server, events, name, model))
            wait_for_pending(server, model, count)
        refused = pass_gate(server, events, "late", model)
        assert (refused.status, refused.error) == (503, "[request id: late] Exceeds maximum queue size")
        events.set("running.go", "a.go", "b.go")
        assert [future.result().status for future in (running, *waiting)] == [200] * 3
        assert not events.happened("late.started")

    def test_request_that_waited_too_long_is_refused(
        self, server: Server, events: Events, background: Background
    ) -> None:
        model = "gate_bounded"
        running = background(pass_gate, server, events, "running", model)
        events.wait("running.started")
        client = Client("http", server)

        def late() -> str:
            inputs = {"EVENTS": strings(str(events.folder)).reshape(1, 1), "NAME": strings("late").reshape(1, 1)}
            with client.refused("UNAVAILABLE", "Request timeout expired"):
                client.infer(model, inputs, timeout=1)
            return "refused"

        waiting = background(late)
        wait_for_pending(server, model, 1)
        events.set("running.go")
        assert running.result().status == 200
        assert waiting.result() == "refused"
        assert not events.happened("late.started")


def test_sequence_controls_reach_the_model(client: Client) -> None:
    result = client.infer(
        "accumulate", {"INPUT": ints(4).reshape(1, 1)}, sequence_id=9001, sequence_start=True, sequence_end=True
    )
    assert result["CORRELATION"].tolist() == [[9001]]


def test_request_of_an_iterative_sequence_comes_again_as_often_as_the_model_wants(client: Client) -> None:
    for times in (3, 1):
        result = client.infer("iterative", {"TIMES": ints(times).reshape(1, 1)})
        assert result["SEEN"].tolist() == [[1, *[0] * (times - 1)]]
