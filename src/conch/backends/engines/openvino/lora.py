"""LoRA adapters of the engine ``openvino``: branches of a graph, whose matrices are inputs.

A layer ``W`` with an adapter computes ``W·x + B·(A·x)``. The base model has matrices of rank 0, which add nothing. The
weights are not changed, so that all adapters share them, and may have any precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import openvino
from openvino import opset13 as ops

from conch.backends.generation.lora import LoraWeights

_INPUT: Final = re.compile(r"lora\.(A|B)\.(.*)")
#: The name of an operation in a numbered block of the decoder: the name of its layer, then others.
_IN_BLOCK: Final = re.compile(r"(.+\.\d+\.[^/]+)/.*")


def adapter_inputs(adapter: LoraWeights, ports: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the inputs for adapters among ``ports``, by name.

    Raises INVALID_ARG for an adapter with a layer that has no inputs, or that has another size.
    """
    tensors = {}
    missing = set(adapter.layers)
    for name, port in ports.items():
        if match := _INPUT.fullmatch(name):
            shape = [0 if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape()]
            layer = _layer(adapter, match[2])
            values = np.zeros(shape, np.float32)
            if layer is not None:
                values = adapter.layers[layer][match[1] == "B"]
                missing.discard(layer)
                if any(size not in (0, given) for size, given in zip(shape, values.shape, strict=True)):
                    raise adapter.wrong_size(layer)
            tensors[name] = openvino.Tensor(np.ascontiguousarray(values), shared_memory=True)
    if missing:
        raise adapter.misfit(f"{min(missing)}.lora_A.weight")
    return tensors


def _layer(adapter: LoraWeights, name: str) -> str | None:
    """Return the layer of an adapter that is layer ``name`` of the graph, where modules around the model precede it."""
    return next((layer for layer in adapter.layers if f".{name}".endswith(f".{layer}")), None)


def add_branches(model: Any, adapters: Mapping[str, LoraWeights], *, everywhere: bool = False) -> None:
    """Add a branch to each layer of ``model`` (modified in place) that one of the ``adapters`` has.

    With ``everywhere``, all layers of the decoder get one, for adapters that are loaded later. Raises INVALID_ARG for
    an adapter with a layer that the graph lacks, or that has another size.
    """
    layers = {layer: adapter for adapter in adapters.values() for layer in adapter.layers}
    nodes = [node for node in model.get_ops() if node.get_type_name() == "MatMul"] if layers or everywhere else []
    found: dict[str, Any] = dict(_block_layers(nodes)) if everywhere else {}
    for layer, adapter in layers.items():
        named = [node for node in nodes if f".{layer}/" in f".{node.get_friendly_name()}"]
        if len(named) != 1:
            raise adapter.misfit(f"{layer}.lora_A.weight")
        found.setdefault(named[0].get_friendly_name().partition("/")[0], named[0])
    for layer, node in found.items():
        columns, rows = _size(node)
        for adapter in adapters.values():
            if (held := _layer(adapter, layer)) is not None:
                adapter.check_layer(held, columns, rows)
        down = ops.parameter([-1, columns], np.float32, name=f"lora.A.{layer}")
        up = ops.parameter([rows, -1], np.float32, name=f"lora.B.{layer}")
        for parameter in (down, up):
            parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
        readers = list(node.output(0).get_target_inputs())
        branch = ops.matmul(ops.matmul(node.input_value(0), down, False, True), up, False, True)
        total = ops.add(node.output(0), branch)
        for reader in readers:
            reader.replace_source_output(total.output(0))
        model.add_parameters([down, up])
    model.validate_nodes_and_infer_types()


def _block_layers(nodes: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the multiplications with weights in the numbered blocks, with the names of their layers."""
    for node in nodes:
        match = _IN_BLOCK.fullmatch(node.get_friendly_name())
        if match and node.input_value(1).get_partial_shape().is_static:
            yield match[1], node


def _size(node: Any) -> tuple[int, int]:
    """Return the number of inputs and outputs of a multiplication with weights."""
    weights = node.input_value(1).get_partial_shape()
    columns, rows = (weights[-1], weights[-2]) if node.get_attributes()["transpose_b"] else (weights[-2], weights[-1])
    return columns.get_length(), rows.get_length()
