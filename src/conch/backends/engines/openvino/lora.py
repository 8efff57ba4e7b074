"""LoRA adapters of the engine ``openvino``: reads and checks what PEFT saves."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from conch.backends.engines.openvino.config import reason
from conch.errors import invalid


def lora(path: Path, graph: Path) -> Any:
    """GenAI's configuration of an adapter that it adds to the weights of ``graph`` at load.

    ``path`` is a folder or file that PEFT has saved.  Raises INVALID_ARG for an adapter that does not fit the graph.
    """
    import openvino_genai

    file = path / "adapter_model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise invalid(f"LoRA adapter {path} has no adapter_model.safetensors")
    _check_layers(file, graph.read_text())
    try:
        made: Any = openvino_genai.Adapter(file)
    except RuntimeError as error:
        raise invalid(f"LoRA adapter {path}: {reason(error)}") from None
    return openvino_genai.AdapterConfig(made, _scale(file), openvino_genai.AdapterConfig.Mode.MODE_STATIC)


def _scale(file: Path) -> float:
    """The factor of an adapter's matrices: alpha / rank, from adapter_config.json."""
    beside = file.with_name("adapter_config.json")
    if not beside.is_file():
        return 1.0
    try:
        config = json.loads(beside.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError):
        raise invalid(
            f"LoRA adapter {file.parent}: adapter_config.json must have numbers 'r' and 'lora_alpha'"
        ) from None
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if config.get(key):
            raise invalid(f"LoRA adapter {file.parent}: engine 'openvino' does not support {key}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_layers(file: Path, graph: str) -> None:
    """Raise INVALID_ARG for weights of layers that the graph does not have, which GenAI would ignore."""
    try:
        with file.open("rb") as content:
            (size,) = struct.unpack("<Q", content.read(8))
            names = json.loads(content.read(size))
    except (ValueError, struct.error, MemoryError):
        raise invalid(f"LoRA adapter {file} is not a safetensors file") from None
    for name in sorted(set(names) - {"__metadata__"}):
        layer, found, _ = name.partition(".lora_")
        layer = layer.removeprefix("base_model.model.")
        if not found or not (f".{layer}/" in graph or f'"{layer}/' in graph):
            raise invalid(
                f"LoRA adapter {file.parent} has weights '{name}' that engine 'openvino' cannot add to the model"
            )
