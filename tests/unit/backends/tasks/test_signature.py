"""A configuration is completed with a task's tensors, and refused where it contradicts them."""

from typing import Any

import pytest

from conch.backends.tasks.task import TaskDescription, complete_config
from conch.core.errors import ConchError
from conch.core.inference import TensorSpec

TASK = TaskDescription(
    (TensorSpec("text_input", "BYTES", (1,)), TensorSpec("top_k", "INT32", (1,), optional=True)),
    (TensorSpec("label", "BYTES", (-1,)), TensorSpec("logits", "FP32", (3,))),
)


def text_input(**changes: Any) -> dict[str, Any]:
    return {"name": "text_input", "data_type": "TYPE_STRING", "dims": ["1"], **changes}


def test_what_is_left_open_is_the_tasks() -> None:
    completed = complete_config({"name": "m"}, TASK)
    assert [tensor["name"] for tensor in completed["input"]] == ["text_input", "top_k"]
    assert completed["max_batch_size"] == 256 and completed["dynamic_batching"] == {}


@pytest.mark.parametrize(
    "dims", [{"dims": ["1"]}, {"dims": ["-1"]}, {"dims": ["7"], "reshape": {"shape": ["1"]}}], ids=str
)
def test_dims_that_the_task_can_take_are_kept(dims: dict[str, Any]) -> None:
    assert complete_config({"name": "m", "input": [text_input(**dims)]}, TASK)["input"] == [text_input(**dims)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": ["3"]}, r"input 'text_input' has dims \[3\] in the configuration, but \[1\] in its task"),
        ({"dims": ["1", "1"]}, r"has dims \[1,1\]"),
        ({"reshape": {"shape": []}}, r"has dims \[\]"),
        ({"data_type": "TYPE_FP32"}, "is TYPE_FP32 in the configuration, but TYPE_STRING in its task"),
        ({"name": "text"}, "unexpected inference input 'text', its task has: text_input, top_k"),
    ],
)
def test_a_tensor_that_the_task_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError, match=message):
        complete_config({"name": "m", "input": [text_input(**changes)]}, TASK)
