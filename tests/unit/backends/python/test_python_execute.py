"""Models that answer by returning a list, in a real worker process."""

from __future__ import annotations

import numpy as np
import pytest

from conch.core.tensors import WireTensor, pack_bytes, split_bytes
from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import LaunchWorker, array, first, string

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(t.name(), t.as_numpy()) for t in r.inputs()]) for r in requests
        ]
"""

# Runs the text that it is sent as Python, and answers with what it evaluates to or raises.
EVAL = """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(repr(eval(text(r), {**globals(), "request": r, "self": self}))) for r in requests]
"""

# Returns from execute what the text that it is sent evaluates to.
RETURN = """
class TritonPythonModel:
    def execute(self, requests):
        return eval(text(requests[0]), {**globals(), "requests": requests})
"""


@every_python
def test_every_datatype_comes_back_as_it_went(launch: LaunchWorker) -> None:
    worker = launch(ECHO)
    sent = [
        array(name, name, np.array([[0, 1, 2], [3, 4, 100]]).astype(dtype))
        for name, dtype in {
            "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1", "INT16": "i2",
            "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
        }.items()
    ]  # fmt: skip
    sent.append(WireTensor("BYTES", "BYTES", (3, 1), pack_bytes([b"a", b"", "ü\0".encode()])))
    sent.append(WireTensor("EMPTY", "FP32", (0, 3), b""))
    sent.append(WireTensor("NONE", "BYTES", (0,), b""))
    sent.append(WireTensor("SCALAR", "INT32", (), b"\1\0\0\0"))
    outputs = worker.infer(sent, outputs=tuple(t.name for t in sent))["responses"][0]["outputs"]
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in outputs.values()] == [
        (t.name, t.datatype, t.shape, bytes(t.data)) for t in sent
    ]


def test_batch_of_requests_gets_its_answers_in_order(launch: LaunchWorker) -> None:
    done = launch(EVAL).infer("1", "2", "len(request.inputs())")
    assert [first(response) for response in done["responses"]] == ["1", "2", "1"]
    assert len(done["times"]) == 3 and min(done["times"]) >= 0


@every_python
def test_huge_tensors_go_both_ways_and_their_memory_is_used_again(launch: LaunchWorker) -> None:
    worker = launch(ECHO)
    for seed in range(5):
        values = np.random.default_rng(seed).random(500_000, np.float32)
        (response,) = worker.infer([array("OUT", "FP32", values), string("x")])["responses"]
        assert bytes(response["outputs"]["OUT"].data) == values.tobytes()
    assert len(worker.endpoint.buffers) == 2  # one for the tensors, one for the heartbeat
    assert len(worker.endpoint.pool.lent) + len(worker.endpoint.pool.free) <= 2


def test_region_is_given_back_when_the_model_lets_go_of_the_array(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            command = text(requests[0])
            if command == "keep":
                self.kept = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()[1:].reshape(-1, 1)
            elif command == "drop":
                del self.kept
            else:
                return [answer(str(self.kept.sum()))]
            return [answer()]
    """)
    ones = array("X", "INT64", np.ones(100_000, np.int64))
    worker.infer([string("keep"), ones])
    worker.infer([string("other"), array("X", "INT64", np.zeros(100_000, np.int64))])
    assert worker.text("sum") == "99999"
    lent = len(worker.endpoint.pool.lent)
    worker.infer("drop")
    while len(worker.endpoint.pool.lent) == lent:
        worker.endpoint.receive(worker.socket)


def test_input_arrays_are_writable_and_the_same_at_every_call(launch: LaunchWorker) -> None:
    worker = launch(EVAL)
    array_of = "pb_utils.get_input_tensor_by_name(request, {!r}).as_numpy()"
    for name in ("SMALL", "LARGE"):
        expression = f"{array_of}.flags.writeable, {array_of} is {array_of}".replace("{!r}", repr(name))
        small, large = (array(n, "FP32", np.zeros(size, np.float32)) for n, size in (("SMALL", 3), ("LARGE", 99_999)))
        assert worker.text([string(expression), small, large]) == "(True, True)"


def test_input_that_is_not_aligned_in_the_frame_is_aligned_for_the_model(launch: LaunchWorker) -> None:
    worker = launch(EVAL)
    odd = WireTensor("ODD", "UINT8", (3,), b"abc")
    values = array("X", "FP64", np.arange(3.0))
    expression = "(lambda a: (a.flags.aligned, a.tolist()))(request.inputs()[1].as_numpy())"
    assert worker.text([odd, values, string(expression)]) == "(True, [0.0, 1.0, 2.0])"


def test_strings_reach_the_model_as_bytes_objects(launch: LaunchWorker) -> None:
    worker = launch(EVAL)
    words = WireTensor("WORDS", "BYTES", (2, 2), pack_bytes([b"a", b"", "ü".encode(), b"\xff"]))
    expression = (
        "(lambda a: (a.dtype.name, a.tolist()))(pb_utils.get_input_tensor_by_name(request, 'WORDS').as_numpy())"
    )
    assert worker.text([string(expression), words]) == "('object', [[b'a', b''], [b'\\xc3\\xbc', b'\\xff']])"


@pytest.mark.parametrize(
    ("expression", "elements"),
    [
        ("np.array([b'a', 'ü', 3, None], dtype=object)", [b"a", "ü".encode(), b"3", b"None"]),
        ("np.array([b'a', b'bcd'])", [b"a", b"bcd"]),
        ("np.array(['a', 'ü'])", [b"a", "ü".encode()]),
        ("np.array([[b'a', b'b'], [b'c', b'd']], dtype=object).T", [b"a", b"c", b"b", b"d"]),
    ],
)
def test_string_arrays_of_every_kind_are_sent(launch: LaunchWorker, expression: str, elements: list[bytes]) -> None:
    worker = launch(RETURN)
    (response,) = worker.infer(f"[pb_utils.InferenceResponse([pb_utils.Tensor('OUT', {expression})])]")["responses"]
    assert split_bytes(response["outputs"]["OUT"].data) == elements


def test_array_that_is_not_contiguous_is_sent_in_row_major_order(launch: LaunchWorker) -> None:
    worker = launch(RETURN)
    expression = "[pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.arange(6, dtype='i4').reshape(2, 3).T)])]"
    output = worker.infer(expression)["responses"][0]["outputs"]["OUT"]
    assert output.shape == (3, 2)
    assert np.frombuffer(output.data, "i4").tolist() == [0, 3, 1, 4, 2, 5]


@every_python
def test_tensor_goes_through_dlpack_with_its_memory(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            given = requests[0].inputs()[0]
            taken = pb_utils.Tensor.from_dlpack("OUT", given.to_dlpack())
            given.as_numpy()[0] = 7
            return [pb_utils.InferenceResponse([taken])]
    """)
    (response,) = worker.infer([array("X", "FP32", np.arange(50_000, dtype=np.float32))])["responses"]
    assert np.frombuffer(response["outputs"]["OUT"].data, np.float32)[:3].tolist() == [7.0, 1.0, 2.0]


def test_outputs_that_were_not_requested_are_dropped(launch: LaunchWorker) -> None:
    worker = launch(ECHO)
    sent = [string("a", "A"), string("b", "B")]
    assert list(worker.infer(sent, outputs=("B",))["responses"][0]["outputs"]) == ["B"]


def test_input_tensor_itself_may_be_an_output(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse(r.inputs()) for r in requests]
    """)
    values = array("X", "FP32", np.arange(50_000, dtype=np.float32))
    outputs = worker.infer([string("text"), values], outputs=("IN", "X"))["responses"][0]["outputs"]
    assert bytes(outputs["X"].data) == values.data
    assert bytes(outputs["IN"].data) == b"\4\0\0\0text"


def test_model_sees_what_the_client_said(launch: LaunchWorker) -> None:
    worker = launch(EVAL)
    fields = {
        "id": "r1",
        "correlation_id": "seq",
        "flags": 3,
        "timeout": 5,
        "parameters": {"a": 1, "b": "é", "c": True, "f": 1.5},
    }
    expression = (
        "[request.request_id(), request.correlation_id(), request.flags(), request.timeout(), request.parameters(), "
        "request.requested_output_names(), request.trace().get_context(), request.is_cancelled()]"
    )
    assert eval(worker.text(expression, **fields)) == [
        "r1", "seq", 3, 5, '{"a":1,"b":"é","c":true,"f":1.5}', {"OUT"}, None, False,
    ]  # fmt: skip


def test_error_of_one_request_leaves_the_others_alone(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            error = pb_utils.TritonError("no such word", pb_utils.TritonError.NOT_FOUND)
            failed = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1))], error)
            return [answer("good"), failed, answer("fine")]
    """)
    good, bad, fine = worker.infer("1", "2", "3")["responses"]
    assert (first(good), first(fine)) == ("good", "fine")
    assert bad["error"] == ["NOT_FOUND", "no such word"] and not bad["outputs"]


def test_response_parameters_travel(launch: LaunchWorker) -> None:
    worker = launch(RETURN)
    (response,) = worker.infer("[pb_utils.InferenceResponse([], None, {'a': 1, 'b': 'é'})]")["responses"]
    assert response["parameters"] == {"a": 1, "b": "é"}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(answer(),)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ("{}", "Expected a list in the execute return, found type '<class 'dict'>'."),
        (
            "['s']",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        (
            "[answer(), answer()]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n",
        ),
    ],
)
def test_wrong_return_value_fails_the_batch(launch: LaunchWorker, expression: str, text: str) -> None:
    worker = launch(RETURN)
    assert worker.infer(expression)["error"] == [
        "INTERNAL",
        f"Failed to process the request(s) for model 'm_0_0', message: {text}",
    ]
    assert worker.infer("[answer('next')]")["responses"]
