"""What of a graph belongs to sequences, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from conch.backends.graphs.signature import GraphTensor, SequenceTensors
from conch.core.errors import ConchError

INPUTS = tuple(GraphTensor(name, kind, (-1, 1)) for name, kind in (("x", "FP32"), ("ready", "BOOL"), ("in", "FP32")))
OUTPUTS = tuple(GraphTensor(name, "FP32", (-1, 1)) for name in ("y", "out"))


def config(ready: str = "bool_false_true", **state: str) -> dict[str, Any]:
    control = {"kind": "CONTROL_SEQUENCE_READY", "data_type": "TYPE_INVALID", ready: [False, True]}
    described = {"input_name": "in", "output_name": "out", "data_type": "TYPE_FP32", **state}
    return {"sequence_batching": {"control_input": [{"name": "ready", "control": [control]}], "state": [described]}}


def test_clients_see_neither_controls_nor_states() -> None:
    inputs, outputs = SequenceTensors.of(config()).of_clients(INPUTS, OUTPUTS)
    assert ([tensor.name for tensor in inputs], [output.name for output in outputs]) == (["x"], ["y"])
    SequenceTensors.of(config()).check("m", INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(input_name="other"), "configuration specifies state input 'other', but model does not provide it"),
        (config(output_name="other"), "configuration specifies state output 'other', but model does not provide it"),
        (
            config(ready="int32_false_true"),
            "sequence control 'ready': the model expects data-type TYPE_BOOL but the model configuration specifies "
            "data-type TYPE_INT32",
        ),
    ],
)
def test_what_the_graph_does_not_have_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as refused:
        SequenceTensors.of(given).check("m", INPUTS, OUTPUTS)
    assert refused.value.message == f"unable to load model 'm', {message}"
