"""Calls of other models, which functions or loaded models answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import conch.testing
from conch.core.errors import Code, ConchError
from tests.unit.testing.models import BATCHED, MAIN, Write, ones

CALLING = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "name")
            call = pb_utils.InferenceRequest(model_name="other", inputs=[name], requested_output_names=["length"])
            answer = call.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
                continue
            length = pb_utils.get_output_tensor_by_name(answer, "length").as_numpy()
            output = np.array([[str(int(length[0, 0]))]])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", output)]))
        return responses
"""


def test_calls_of_other_models_are_answered_by_functions(write: Write) -> None:
    asked = []

    def other(name: np.ndarray[Any, Any]) -> dict[str, Any]:
        asked.append(name.tolist())
        return {"length": np.array([[len(name[0, 0])]], np.int32), "not wanted": ["x"]}

    with conch.testing.load(write(CALLING), models={"other": other}) as model:
        assert model(name="Ada").texts("greeting") == ["3"]
    assert asked == [[[b"Ada"]]]


def test_what_a_function_raises_is_an_error_of_its_response_or_the_tests(write: Write) -> None:
    def refusing(**inputs: Any) -> dict[str, Any]:
        raise ConchError("too long", Code.INVALID_ARG)

    def mistaken(**inputs: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the test")

    directory = write(CALLING)
    with conch.testing.load(directory, models={"other": refusing}) as model:
        with pytest.raises(ConchError, match="too long"):
            model(name="Ada")
    with conch.testing.load(directory, models={"other": mistaken}) as model:
        with pytest.raises(ZeroDivisionError, match="in the test"):
            model(name="Ada")
    with conch.testing.load(directory) as model:
        with pytest.raises(ConchError, match="Model 'other' is not ready"):
            model(name="Ada")


def test_a_loaded_model_may_stand_for_another(write: Write) -> None:
    """Each is a ``1.model`` and asks for the runtime of its own, also after it has called the other."""
    measuring = """
    class TritonPythonModel:
        def execute(self, requests):
            name = pb_utils.get_input_tensor_by_name(requests[0], "name").as_numpy()
            length = np.array([[len(name[0, 0]) + 100 * pb_utils.get_model_dir().endswith("other/1")]], np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("length", length)])]
    """
    config = BATCHED.replace('"greeting" data_type: TYPE_STRING', '"length" data_type: TYPE_INT32')
    calling = CALLING.replace("str(int(length[0, 0]))", "str(int(length[0, 0])) + pb_utils.get_model_dir()[-3:]")
    with conch.testing.load(write(measuring, name="other", config=config)) as other:
        with conch.testing.load(write(calling), models={"other": other}) as model:
            assert model(name="Ada").texts("greeting") == ["103m/1"]


def test_calls_work_as_in_the_toy_repository() -> None:
    """Synchronous, asynchronous, decoupled, and loading and unloading."""
    with (
        conch.testing.load(MAIN / "plus_one") as plus_one,
        conch.testing.load(MAIN / "repeat") as repeat,
        conch.testing.load(MAIN / "calling_async", models={"plus_one": plus_one, "repeat": repeat.stream}) as model,
    ):
        assert set(model(ones(model))) == set(model.signature.outputs)


def test_models_can_be_loaded_and_unloaded(write: Write) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            said = [pb_utils.is_model_ready("other")]
            pb_utils.unload_model("other")
            said.append(pb_utils.is_model_ready("other"))
            pb_utils.load_model("other")
            said.append(pb_utils.is_model_ready("other"))
            try:
                pb_utils.load_model("unknown")
            except pb_utils.TritonModelException as error:
                said.append("failed to poll" in str(error))
            return [pb_utils.InferenceResponse([pb_utils.Tensor("greeting", np.array([[str(said)]]))])]
    """
    with conch.testing.load(write(source), models={"other": lambda **inputs: {}}) as model:
        assert model(name="x").texts("greeting") == ["[True, False, True, True]"]
