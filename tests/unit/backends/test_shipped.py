"""The small backends that come with conch, each run as a model that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.backends.python.request import InferenceRequest
from conch.backends.python.tensor import Tensor
from conch.core.errors import ConchError
from conch.repository.backends import SHIPPED
from conch.testing import ModelRequest, ModelUnderTest, load
from conch.testing.instance import ModelImports

IDENTITY = """
backend: "identity"
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 2 ] optional: true },
        { name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 2 ] },
         { name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


def model(folder: Path, config: str, **parameters: str) -> ModelUnderTest:
    directory = folder / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    return load(directory, parameters=parameters)


@pytest.fixture
def identity(tmp_path: Path) -> Iterator[ModelUnderTest]:
    with model(tmp_path, IDENTITY) as loaded:
        yield loaded


def test_identity_answers_with_its_inputs_and_the_example_parameters(identity: ModelUnderTest) -> None:
    reply = identity(INPUT0=[[1, 2]], INPUT1=[["a", "b", "ü"]])
    assert reply["OUTPUT0"].tolist() == [[1, 2]]
    assert reply.texts("OUTPUT1") == ["a", "b", "ü"]
    assert reply.parameters == {"param0": "an example string parameter", "param1": 42, "param2": False}


def test_identity_answers_with_the_parameters_of_the_request(identity: ModelUnderTest) -> None:
    request = ModelRequest(
        {"INPUT1": [["a"]]}, outputs=["OUTPUT1"], parameters={"param1": 7, "param3": "x", "other": 1}
    )
    [reply] = identity.batch([request])
    assert list(reply) == ["OUTPUT1"]
    assert reply.parameters == {"param0": "an example string parameter", "param1": 7, "param2": False, "param3": "x"}


def test_identity_answers_with_zeros_for_an_input_left_out(identity: ModelUnderTest) -> None:
    reply = identity(INPUT1=[["a"], ["b"], ["c"]])
    assert reply["OUTPUT0"].tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"INPUT0"', '"IN0"', r"expected input name to follow INPUT<index> pattern, got 'IN0'"),
        ('"OUTPUT0"', '"OUT0"', r"expected output name to follow OUTPUT<index> pattern, got 'OUT0'"),
        ('"OUTPUT0"', '"OUTPUT7"', r"expected input and output indices to match"),
        ("TYPE_INT32 dims: [ 2 ] }", "TYPE_FP32 dims: [ 2 ] }", r"datatype to match, got TYPE_INT32 and TYPE_FP32"),
        (
            "TYPE_INT32 dims: [ 2 ] }",
            "TYPE_INT32 dims: [ 3 ] }",
            r"input and output shape to match, got \[2\] ",
        ),
    ],
)
def test_identity_refuses_tensors_that_do_not_pair(tmp_path: Path, before: str, after: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason), model(tmp_path, IDENTITY.replace(before, after)):
        pass


def test_identity_waits_as_its_parameters_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    wanted = {"execute_delay_ms": "20", "instance_wise_delay_multiplier": "3", "creation_delay_sec": "5"}
    with model(tmp_path, IDENTITY, **wanted) as loaded:
        assert slept == [5]
        loaded(INPUT1=[["a"]])
    assert slept[1] == 0.02  # instance 0 waits once


def test_repeat_sends_a_response_for_each_element(tmp_path: Path) -> None:
    with model(tmp_path, 'backend: "repeat"') as loaded:
        replies = loaded.stream(IN=[4, 2, 0, 1], DELAY=[1, 0, 0, 1], WAIT=[0])
        assert [(int(reply["OUT"][0]), int(reply["IDX"][0])) for reply in replies] == [(4, 0), (2, 1), (0, 2), (1, 3)]
        assert list(loaded.stream(IN=[], DELAY=[], WAIT=[0])) == []
        [refused] = loaded.stream(IN=[4, 2], DELAY=[1], WAIT=[0])
        assert refused.error is not None
        assert refused.error.message == "expected IN and DELAY shape to match, got [2] and [1]"


def test_square_sends_as_many_responses_as_requested(tmp_path: Path) -> None:
    with model(tmp_path, 'backend: "square"') as loaded:
        assert [reply["OUT"].tolist() for reply in loaded.stream(IN=[3])] == [[3]] * 3
        assert list(loaded.stream(IN=[0])) == []


def test_square_fails_and_falls_silent_at_the_end_when_told_to(tmp_path: Path) -> None:
    wanted = {"CUSTOM_FAIL_COUNT": "2", "CUSTOM_EMPTY_COUNT": "1", "CUSTOM_INFER_DELAY_NS": "1000"}
    with model(tmp_path, 'backend: "square"', **wanted) as loaded:
        replies = list(loaded.stream(IN=[4]))
    assert [reply.error and reply.error.message for reply in replies] == [
        None,
        "simulated failure",
        "simulated failure",
    ]


@pytest.mark.parametrize(
    ("backend", "tensors"),
    [
        ("repeat", 'input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }'),
        ("square", 'input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }'),
        ("square", 'input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }'),
    ],
)
def test_other_tensors_than_the_backends_are_refused(tmp_path: Path, backend: str, tensors: str) -> None:
    with pytest.raises((ValueError, ConchError), match="expect"), model(tmp_path, f'backend: "{backend}" {tensors}'):
        pass


class Controlled:
    """A model of a sequence backend, which is given what a sequence batcher would give it."""

    def __init__(self, folder: Path, backend: str, *controls: str) -> None:
        source = (SHIPPED / backend / "model.py").read_text()
        module: dict[str, Any] = {"__name__": f"{backend}_under_test"}
        with ModelImports(folder, folder).active():
            exec(compile(source, backend, "exec"), module)
        self.model = module["TritonPythonModel"]()
        names = [{"name": name} for name in controls]
        config = {"max_batch_size": 4, "sequence_batching": {"control_input": names}, "parameters": {}}
        self.model.initialize({"model_config": json.dumps(config)})

    def __call__(self, *rows: dict[str, Any]) -> list[list[int] | None]:
        """The output of each request of a batch, None for one without."""
        requests = []
        for row in rows:
            tensors = [
                Tensor(name, np.array([value], np.uint64 if name == "CORRID" else np.int32).reshape(1, -1))
                for name, value in row.items()
            ]
            requests.append(InferenceRequest(model_name="m", requested_output_names=["OUTPUT"], inputs=tensors))
        answers = [response.output_tensors() for response in self.model.execute(requests)]
        return [answer[0].as_numpy()[0].tolist() if answer else None for answer in answers]


def test_sequence_adds_up_in_each_slot(tmp_path: Path) -> None:
    batch = Controlled(tmp_path, "sequence", "START", "READY")
    first, second = {"START": 1, "READY": 1, "INPUT": [1, 2]}, {"START": 1, "READY": 1, "INPUT": [10]}
    assert batch(first, second) == [[3, 3], [10]]
    idle, third = {"START": 0, "READY": 0, "INPUT": [0]}, {"START": 0, "READY": 1, "INPUT": [5]}
    assert batch(idle, third) == [None, [15]]
    assert batch({**third, "INPUT": [2**31 - 1]}) == [[-(2**31) + 2]]
    assert batch(first) == [[3, 3]]


def test_dyna_sequence_adds_up_for_each_correlation_id_and_adds_it_at_the_end(tmp_path: Path) -> None:
    batch = Controlled(tmp_path, "dyna_sequence", "START", "END", "READY", "CORRID")
    go = {"START": 0, "END": 0, "READY": 1}
    assert batch({**go, "START": 1, "CORRID": 7, "INPUT": [1]}, {**go, "START": 1, "CORRID": 9, "INPUT": [5, 5]}) == [
        [1],
        [10, 10],
    ]
    assert batch({**go, "CORRID": 9, "INPUT": [1]}, {**go, "END": 1, "CORRID": 7, "INPUT": [1]}) == [[11], [9]]
    assert batch({**go, "CORRID": 7, "INPUT": [4]}) == [[4]]  # nothing is left of the sequence that has ended
    assert batch({**go, "READY": 0, "CORRID": 9, "INPUT": [4]}) == [None]


@pytest.mark.parametrize("backend", ["sequence", "dyna_sequence"])
def test_sequence_backends_want_their_controls(tmp_path: Path, backend: str) -> None:
    with pytest.raises(ValueError, match="must be configured as the control inputs"):
        Controlled(tmp_path, backend, "START")
