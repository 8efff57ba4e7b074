"""LoRA adapters of the engine ``openvino``: branches of a graph, whose matrices are inputs.

A layer ``W`` with an adapter computes ``W·x + B·(A·x)``. The base model has matrices of rank 0, which add nothing. The
weights are not changed, so that all adapters share them, and may have any precision.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import openvino
from openvino import opset13 as ops

from conch.core.errors import ConchError, invalid

Floats = npt.NDArray[np.float32]

_INPUT: Final = re.compile(r"lora\.(A|B)\.(.*)")
_NAME: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_DTYPES: Final[Mapping[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_UNSUPPORTED: Final = ("use_dora", "modules_to_save", "layer_replication", "target_parameters")


@dataclass(slots=True)
class Adapter:
    """The matrices ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` by layer; ``B`` contains the scale."""

    path: Path = Path()
    layers: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Adapter:
        """Read a folder or file saved by PEFT. Raises INVALID_ARG for an adapter that cannot be added to a layer."""
        file = path / "adapter_model.safetensors" if path.is_dir() else path
        if not file.is_file():
            raise invalid(f"LoRA adapter {path} has no adapter_model.safetensors")
        scales = _Scales.read(file)
        pairs: dict[str, dict[str, Floats]] = {}
        for name, values in _tensors(file).items():
            match = _NAME.fullmatch(name)
            if match is None or values.ndim != 2:
                raise not_added(file, name)
            pairs.setdefault(match[1], {})[match[2]] = values
        layers = {}
        for layer, pair in pairs.items():
            if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
                raise invalid(f"LoRA adapter {path}: the matrices of '{layer}' do not fit each other")
            layers[layer] = pair["A"], pair["B"] * np.float32(scales.of(layer, len(pair["A"])))
        return cls(file, layers)

    def inputs(self, ports: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of the inputs for adapters among ``ports``, by name."""
        tensors = {}
        for name, port in ports.items():
            if match := _INPUT.fullmatch(name):
                shape = [0 if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape()]
                held = self.layers.get(match[2])
                values = np.zeros(shape, np.float32) if held is None else held[match[1] == "B"]
                tensors[name] = openvino.Tensor(np.ascontiguousarray(values), shared_memory=True)
        return tensors


def not_added(file: Path, name: str) -> ConchError:
    return invalid(f"LoRA adapter {file.parent} has weights '{name}' that engine 'openvino' cannot add to the model")


def add_branches(model: Any, adapters: Mapping[str, Adapter]) -> None:
    """Add a branch to each layer of ``model`` (modified in place) that one of the ``adapters`` has.

    Raises INVALID_ARG for an adapter with a layer that the graph lacks, or that has another size.
    """
    layers = {layer: adapter for adapter in adapters.values() for layer in adapter.layers}
    nodes = [node for node in model.get_ops() if node.get_type_name() == "MatMul"] if layers else []
    for layer, adapter in layers.items():
        named = [node for node in nodes if f".{layer}/" in f".{node.get_friendly_name()}"]
        if len(named) != 1:
            raise not_added(adapter.path, f"{layer}.lora_A.weight")
        [node] = named
        columns, rows = node.input_value(0).get_partial_shape()[-1], node.get_output_partial_shape(0)[-1]
        for other in adapters.values():
            if layer in other.layers:
                a, b = other.layers[layer]
                if (a.shape[1], b.shape[0]) != (columns.get_length(), rows.get_length()):
                    raise invalid(f"LoRA adapter {other.path.parent}: the matrices of '{layer}' have another size")
        down = ops.parameter([-1, columns.get_length()], np.float32, name=f"lora.A.{layer}")
        up = ops.parameter([rows.get_length(), -1], np.float32, name=f"lora.B.{layer}")
        for parameter in (down, up):
            parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
        readers = list(node.output(0).get_target_inputs())
        branch = ops.matmul(ops.matmul(node.input_value(0), down, False, True), up, False, True)
        total = ops.add(node.output(0), branch)
        for reader in readers:
            reader.replace_source_output(total.output(0))
        model.add_parameters([down, up])
    model.validate_nodes_and_infer_types()


@dataclass(frozen=True, slots=True)
class _Scales:
    """The factors of an adapter's layers: alpha / rank, or 1 without adapter_config.json.

    With rsLoRA the divisor is the square root of the rank. ``alphas`` override ``alpha`` for layers whose names end
    with a pattern.
    """

    alpha: float | None = None
    root: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> _Scales:
        """Read adapter_config.json next to ``file``. Raises INVALID_ARG for unsupported options."""
        beside = file.with_name("adapter_config.json")
        if not beside.is_file():
            return cls()
        try:
            config = json.loads(beside.read_text())
            alphas = {str(name): float(alpha) for name, alpha in (config.get("alpha_pattern") or {}).items()}
            scales = cls(float(config["lora_alpha"]), bool(config.get("use_rslora")), alphas)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise invalid(f"LoRA adapter {file.parent}: adapter_config.json must have a number 'lora_alpha'") from None
        for key in _UNSUPPORTED:
            if config.get(key):
                raise invalid(f"LoRA adapter {file.parent}: engine 'openvino' does not support {key}")
        return scales

    def of(self, layer: str, rank: int) -> float:
        alpha = next((value for name, value in self.alphas.items() if re.fullmatch(rf"(?:.*\.)?{name}", layer)), None)
        alpha = self.alpha if alpha is None else alpha
        return 1.0 if alpha is None else alpha / (math.sqrt(rank) if self.root else rank)


def _tensors(file: Path) -> dict[str, Floats]:
    """Return the tensors of a safetensors file as float32; numpy has no bfloat16, so the library cannot."""
    try:
        content = np.memmap(file, np.uint8, "r")
        (size,) = struct.unpack("<Q", content[:8].tobytes())
        header = json.loads(content[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        return {name: _floats(content[8 + size :], **entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError):
        raise invalid(f"LoRA adapter {file} is not a safetensors file of floating-point numbers") from None


def _floats(content: Any, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Floats:
    begin, end = data_offsets
    values = content[begin:end].view(_DTYPES[dtype]).reshape(shape)
    floats: Floats
    floats = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)
    return floats
