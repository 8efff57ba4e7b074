"""What a model in the process of its test is sent, and what it answers."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import conch.testing
from conch.core.errors import Code, ConchError
from conch.testing import ModelRequest
from tests.unit.testing.models import GREETER, MAIN, Write, ones


def test_a_model_answers_and_is_finalised(write: Write) -> None:
    directory = write(GREETER, 'parameters { key: "language" value { string_value: "en" } }')
    with conch.testing.load(directory) as model:
        reply = model(name=["Ada"])
        assert reply["greeting"].tolist() == [[b"Hello, Ada"]]
        assert (reply.texts("greeting"), list(reply), reply.parameters) == (["Hello, Ada"], ["greeting"], {})
        loaded = model.python_model
        assert loaded.args.pop("model_config").startswith("{")
        assert loaded.args == {
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0",
            "model_instance_device_id": "0",
            "model_repository": str(directory),
            "model_version": "1",
            "model_name": "m",
        }
        assert model.config["parameters"] == {"language": {"string_value": "en"}}
    assert loaded.ended
    with pytest.raises(ConchError, match="has been closed"):
        model(name=["Ada"])


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("Ada", (1, 1)),
        (b"\xff", (1, 1)),
        (["Ada"], (1, 1)),
        (["Ada", "Alan"], (2, 1)),
        ([["Ada"], ["Alan"]], (2, 1)),
        (np.array([["Ada"]]), (1, 1)),
        (np.array([[b"Ada"], [b"Alan"]], np.object_), (2, 1)),
    ],
)
def test_texts_lists_and_arrays_are_inputs(write: Write, value: Any, shape: tuple[int, ...]) -> None:
    with conch.testing.load(write(GREETER)) as model:
        assert model(name=value)["greeting"].shape == shape
        assert model({"name": value})["greeting"].shape == shape


def test_several_requests_are_one_batch_in_which_each_has_its_own_end(write: Write) -> None:
    with conch.testing.load(write(GREETER)) as model:
        replies = model.batch([{"name": ["Ada", "Alan"]}, {"name": "nobody"}, ModelRequest({"name": "Grace"}, id="7")])
        assert model.python_model.batches == [3]
        assert [reply.error is None for reply in replies] == [True, False, True]
        assert replies[2].texts("greeting") == ["Hello, Grace"]
        with pytest.raises(ConchError, match="nobody is there") as raised:
            replies[1]["greeting"]
        assert raised.value.code is Code.NOT_FOUND
        with pytest.raises(ConchError, match="nobody is there"):
            model(name="nobody")
        with pytest.raises(ConchError, match="have 5 rows, and max_batch_size is 4"):
            model.batch([{"name": ["a"] * 3}, {"name": ["b"] * 2}])
        assert model(name="Ada").texts("greeting") == ["Hello, Ada"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {},
            "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['name']",
        ),
        ({"nam": ["Ada"]}, "unexpected inference input 'nam' for model 'm'"),
        ({"name": np.ones((1, 1), np.float32)}, "data-type is 'FP32', but model 'm' expects 'BYTES'"),
        ({"name": np.array(["Ada"])}, "unexpected shape for input 'name' for model 'm'. Expected [-1,1], got [1]."),
        ({"name": ["Ada"] * 5}, "inference request batch-size must be <= 4 for 'm'"),
    ],
)
def test_requests_are_refused_in_the_servers_words(write: Write, inputs: dict[str, Any], message: str) -> None:
    with conch.testing.load(write(GREETER)) as model:
        with pytest.raises(ConchError) as raised:
            model(**inputs)
        assert message in str(raised.value)
        assert model(name="still there").texts("greeting") == ["Hello, still there"]


def test_only_the_outputs_that_are_asked_for_come() -> None:
    with conch.testing.load(MAIN / "add_sub") as model:
        assert list(model(ModelRequest(ones(model), outputs=["OUTPUT1"]))) == ["OUTPUT1"]
        with pytest.raises(ConchError, match="unexpected inference output 'OTHER' for model 'add_sub'"):
            model(ModelRequest(ones(model), outputs=["OTHER"]))


def test_optional_inputs_may_be_left_out() -> None:
    with conch.testing.load(MAIN / "optional") as model:
        assert (model(A=[1.0], C=[2.0]).texts("GIVEN"), model(A=[1.0]).texts("GIVEN")) == (["AC"], ["A"])


def test_shapes_are_those_of_clients_where_the_model_sees_others() -> None:
    with conch.testing.load(MAIN / "reshape") as model:
        assert set(model(ones(model))) == set(model.signature.outputs)


def test_a_model_sees_what_a_request_says() -> None:
    with conch.testing.load(MAIN / "echo_request") as model:
        reply = model(ModelRequest(ones(model), id="r", parameters={"k": 5}, correlation_id=7, flags=1))
        (seen,) = map(json.loads, reply.texts(next(iter(reply))))
        assert (seen["id"], seen["correlation_id"], seen["flags"]) == ("r", 7, 1)
        assert seen["parameters"] == {"k": 5}


def test_a_configuration_that_the_model_completes_holds() -> None:
    with conch.testing.load(MAIN / "auto_complete") as model:
        assert model.signature.max_batch_size == 4
        assert model(INPUT=[[1, 2, 3, 4]], SCALE=[2])["OUTPUT"].tolist() == [[2, 4, 6, 8]]
    with pytest.raises(AssertionError), conch.testing.load(MAIN / "auto_complete", parameters={"greeting": "bye"}):
        pass


@pytest.mark.parametrize("name", ["square", "asynchronous_decoupled"])
def test_a_decoupled_model_sends_any_number_of_responses(name: str) -> None:
    expected = {"square": [3, 3, 3], "asynchronous_decoupled": [0, 1, 2]}[name]
    with conch.testing.load(MAIN / name) as model:
        assert [int(reply["OUT"][0]) for reply in model.stream(IN=[3])] == expected
        assert list(model.stream(IN=[0])) == []
        several = model.streams([{"IN": [1]}, {"IN": [2]}])
        assert [len(list(replies)) for replies in several] == [1, 2]
        with pytest.raises(TypeError, match="is decoupled: read its responses with stream"):
            model(IN=[3])


def test_an_asynchronous_model_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with conch.testing.load(MAIN / "asynchronous") as model:
        assert set(model(ones(model))) == set(model.signature.outputs)
    assert set(threading.enumerate()) == before
