"""Completes a model configuration with the tensors of its task. Runs in workers when a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conch.backends.tasks.base import TaskDescription
from conch.core.errors import invalid
from conch.core.inference import TensorSpec
from conch.core.tensors import CONFIG_NAME, format_shape


def complete_config(config: Mapping[str, Any], task: TaskDescription) -> dict[str, Any]:
    """Add missing tensors, maximum batch size and dynamic batching to ``config`` (JSON).

    Raises INVALID_ARG for configured tensors that do not match those of the task.
    """
    completed = dict(config)
    completed["input"] = _tensors(config, "input", task.inputs)
    completed["output"] = _tensors(config, "output", task.outputs)
    completed["max_batch_size"] = int(config.get("max_batch_size") or task.max_batch_size)
    scheduled = any(choice in config for choice in ("dynamic_batching", "sequence_batching", "ensemble_scheduling"))
    if completed["max_batch_size"] > 1 and not scheduled:
        completed["dynamic_batching"] = {}
    return completed


def _tensors(config: Mapping[str, Any], kind: str, specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    written = config.get(kind) or []
    if not written:
        return [_tensor(spec, kind) for spec in specs]
    name = config.get("name", "")
    known = {spec.name: spec for spec in specs}
    for tensor in written:
        spec = known.get(tensor["name"])
        if spec is None:
            raise invalid(
                f"model '{name}', unexpected inference {kind} '{tensor['name']}', its task has: {', '.join(known)}"
            )
        if tensor.get("data_type") != CONFIG_NAME[spec.datatype]:
            raise invalid(
                f"model '{name}', {kind} '{spec.name}' is {tensor.get('data_type')} in the configuration, and "
                f"{CONFIG_NAME[spec.datatype]} in its task"
            )
        dims = [int(dim) for dim in (tensor["reshape"].get("shape", ()) if "reshape" in tensor else tensor["dims"])]
        if len(dims) != len(spec.dims) or any(
            -1 not in (dim, own) and dim != own for dim, own in zip(dims, spec.dims, strict=True)
        ):
            raise invalid(
                f"model '{name}', {kind} '{spec.name}' has dims {format_shape(dims)} in the configuration, and "
                f"{format_shape(spec.dims)} in its task"
            )
    missing = [
        spec.name
        for spec in specs
        if kind == "input" and not spec.optional and spec.name not in {tensor["name"] for tensor in written}
    ]
    if missing:
        raise invalid(f"model '{name}', the configuration lacks the input '{missing[0]}' of its task")
    return list(written)


def _tensor(spec: TensorSpec, kind: str) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": spec.name, "data_type": CONFIG_NAME[spec.datatype], "dims": list(spec.dims)}
    if kind == "input" and spec.optional:
        tensor["optional"] = True
    return tensor
