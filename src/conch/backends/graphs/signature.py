"""Completes the tensors of a configuration from a graph, and compares them.

``SequenceTensors`` are control inputs and states, which the server provides instead of clients. Used in workers by the
graph backends. The messages are those of Triton's ONNX Runtime backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conch.core.errors import invalid, unsupported
from conch.core.tensors import CONFIG_NAME, format_shape

#: Default of the backend option ``default-max-batch-size``, the ``max_batch_size`` of batching models that set none.
DEFAULT_MAX_BATCH_SIZE: Final = 4
_SCHEDULERS: Final = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph; ``shape`` includes the batch dimension, and -1 denotes variable dimensions.

    ``datatype`` is the protocol's name, or the graph's own name for types that the protocol lacks (sequences, maps).
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def batches(self) -> bool:
        return bool(self.shape) and self.shape[0] == -1


def default_max_batch_size(backend_config: Mapping[str, str]) -> int:
    """Return the backend option ``default-max-batch-size``. Raises INVALID_ARG if it is not an integer."""
    return integer_of(backend_config, "default-max-batch-size", DEFAULT_MAX_BATCH_SIZE)


def integer_of(values: Mapping[str, str], name: str, default: int) -> int:
    """Return an option or parameter as an integer. Raises INVALID_ARG, naming it."""
    if name not in values:
        return default
    try:
        return int(values[name])
    except ValueError:
        raise invalid(f"failed to convert {name} '{values[name]}' to integral number") from None


def complete(
    config: dict[str, Any],
    inputs: Sequence[GraphTensor],
    outputs: Sequence[GraphTensor],
    default_max_batch_size: int,
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """Fill in missing batch size, scheduler, inputs and outputs of a configuration from the graph.

    Raises INVALID_ARG if the configuration sets ``max_batch_size`` but the model cannot batch.
    """
    config = dict(config)
    name = config["name"]
    if all(tensor.batches for tensor in (*inputs, *outputs)):
        if not config.get("max_batch_size"):
            config["max_batch_size"] = max(default_max_batch_size, 0)
            warn(
                f"autofilled max_batch_size to {config['max_batch_size']} for model '{name}' since batching is "
                "supporrted but no max_batch_size is specified in model configuration. Must specify max_batch_size to "
                "utilize autofill with a larger max batch size"
            )
        if config["max_batch_size"] > 1 and not any(scheduler in config for scheduler in _SCHEDULERS):
            config["dynamic_batching"] = {}
    elif config.get("max_batch_size"):
        raise invalid(
            f"autofill failed for model '{name}': model does not support batching while non-zero max_batch_size is "
            "specified"
        )
    batched = bool(config.get("max_batch_size"))
    batch_names = {tensor["name"] for tensor in batch_inputs(config)}
    for key, tensors in (
        ("input", [tensor for tensor in inputs if tensor.name not in batch_names]),
        ("output", outputs),
    ):
        config[key] = config.get(key) or [_described(name, tensor, batched) for tensor in tensors]
    return config


def _described(model: str, tensor: GraphTensor, batched: bool) -> dict[str, Any]:
    if tensor.datatype not in CONFIG_NAME:
        raise unsupported(f"model '{model}', tensor '{tensor.name}' is a {tensor.datatype}, which no client can send")
    dims = list(tensor.shape[1:] if batched else tensor.shape)
    described = {"name": tensor.name, "data_type": CONFIG_NAME[tensor.datatype], "dims": dims or [1]}
    return described if dims else {**described, "reshape": {"shape": []}}


def check(
    config: Mapping[str, Any],
    inputs: Sequence[GraphTensor],
    outputs: Sequence[GraphTensor],
    initializers: Sequence[GraphTensor] = (),
) -> None:
    """Raise INVALID_ARG if a configuration does not match the graph.

    ``initializers`` are constants of the graph that a request may override, as optional inputs.
    """
    model = config["name"]
    batched = int(config.get("max_batch_size", 0)) > 0
    batch_tensors = batch_inputs(config)
    count = sum(not tensor.get("optional") for tensor in config.get("input", ())) + len(batch_tensors)
    if count != len(inputs):
        raise invalid(
            f"unable to load model '{model}', configuration expects {count} inputs, model provides {len(inputs)}"
        )
    scattered = {name for batch_output in config.get("batch_output", ()) for name in batch_output["target_name"]}
    for kind, tensors in (("input", (*inputs, *initializers)), ("output", outputs)):
        known = {tensor.name: tensor for tensor in tensors}
        for declared in (*config.get(kind, ()), *(batch_tensors if kind == "input" else ())):
            name = declared["name"]
            if name not in known:
                raise invalid(f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(known)}")
            _check_type(model, kind, declared, known[name])
            if declared.get("optional") and batched:
                raise invalid(
                    f"unable to load model '{model}', optional input '{name}' is not supported for models that support "
                    "batching"
                )
            if declared.get("allow_ragged_batch"):
                _check_ragged(model, known[name])
            elif "dims" in declared and name not in scattered:
                _check_shape(model, declared, known[name], batched)


def batch_inputs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the batch inputs of a configuration, which clients do not send; their shapes depend on the batch."""
    return [
        {"name": name, "data_type": batch_input["data_type"]}
        for batch_input in config.get("batch_input", ())
        for name in batch_input["target_name"]
    ]


def _check_type(model: str, kind: str, declared: Mapping[str, Any], tensor: GraphTensor) -> None:
    provided = CONFIG_NAME.get(tensor.datatype, tensor.datatype)
    if declared["data_type"] != provided:
        raise invalid(
            f"unable to load model '{model}', configuration expects datatype {declared['data_type']} for {kind} "
            f"'{tensor.name}', model provides {provided}"
        )


def _check_ragged(model: str, tensor: GraphTensor) -> None:
    """Raise INVALID_ARG unless a ragged input has one variable dimension, for the concatenated elements of a batch.

    The two spaces in the message are as in Triton.
    """
    if tensor.shape != (-1,):
        raise invalid(
            f"unable to load model '{model}', configuration expects model provides input with shape [-1]  for ragged "
            f"input '{tensor.name}', model provides {format_shape(tensor.shape)}"
        )


def _check_shape(model: str, declared: Mapping[str, Any], tensor: GraphTensor, batched: bool) -> None:
    where = f"model '{model}', tensor '{tensor.name}': "
    shape = format_shape(tensor.shape)
    if batched and not tensor.batches:
        raise invalid(
            f"{where}for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {shape}"
        )
    dims = [int(dim) for dim in (declared["reshape"]["shape"] if declared.get("reshape") else declared["dims"])]
    full = [-1, *dims] if batched else dims
    if len(full) == len(tensor.shape) and all(own in (-1, dim) for own, dim in zip(tensor.shape, full, strict=True)):
        return
    complete_shape = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
        f"shape {format_shape(full)}"
        if batched
        else f"shape {format_shape(full)}"
    )
    raise invalid(
        f"{where}the model expects {len(tensor.shape)} dimensions (shape {shape}) but the model configuration "
        f"specifies {len(full)} dimensions ({complete_shape})"
    )


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
        for kind, datatypes, tensors in (
            ("sequence control", self.controls, inputs),
            ("state input", self.state_inputs, inputs),
            ("state output", self.state_outputs, outputs),
        ):
            known = {tensor.name: tensor for tensor in tensors}
            for name, datatype in datatypes.items():
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
