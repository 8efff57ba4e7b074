"""The sequence tensors of a graph: control inputs and states, which the server provides instead of clients.

Used in workers by the backends ``onnxruntime``, ``openvino`` and ``pytorch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conch.backends.graphs.signature import GraphTensor
from conch.core.errors import invalid
from conch.core.tensors import CONFIG_NAME

_VALUES: Final = {
    "int32_false_true": "TYPE_INT32",
    "fp32_false_true": "TYPE_FP32",
    "bool_false_true": "TYPE_BOOL",
}


@dataclass(frozen=True, slots=True)
class SequenceTensors:
    """The datatypes of a configuration's control inputs and states, by tensor name."""

    controls: Mapping[str, str]
    state_inputs: Mapping[str, str]
    state_outputs: Mapping[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SequenceTensors:
        """Read a configuration (JSON object); empty if it has no sequence batching."""
        batching = config.get("sequence_batching") or {}
        states = batching.get("state", ())
        return cls(
            dict(_controls(batching)),
            {state["input_name"]: state["data_type"] for state in states},
            {state["output_name"]: state["data_type"] for state in states},
        )

    def of_clients(
        self, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]
    ) -> tuple[tuple[GraphTensor, ...], tuple[GraphTensor, ...]]:
        """Return the inputs and outputs of a graph without the sequence tensors."""
        supplied = {*self.controls, *self.state_inputs}
        return (
            tuple(tensor for tensor in inputs if tensor.name not in supplied),
            tuple(tensor for tensor in outputs if tensor.name not in self.state_outputs),
        )

    def check(self, model: str, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> None:
        """Raise INVALID_ARG for a sequence tensor that the graph lacks or that has another datatype in the graph."""
        for kind, wanted, tensors in (
            ("sequence control", self.controls, inputs),
            ("state input", self.state_inputs, inputs),
            ("state output", self.state_outputs, outputs),
        ):
            known = {tensor.name: tensor for tensor in tensors}
            for name, datatype in wanted.items():
                if name not in known:
                    raise invalid(
                        f"unable to load model '{model}', configuration specifies {kind} '{name}', but model does not "
                        "provide it"
                    )
                provided = CONFIG_NAME.get(known[name].datatype, known[name].datatype)
                if datatype != provided:
                    raise invalid(
                        f"unable to load model '{model}', {kind} '{name}': the model expects data-type {provided} but "
                        f"the model configuration specifies data-type {datatype}"
                    )


def _controls(batching: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for tensor in batching.get("control_input", ()):
        for control in tensor.get("control", ()):
            of_values = [datatype for field, datatype in _VALUES.items() if control.get(field)]
            yield tensor["name"], of_values[0] if of_values else control["data_type"]
