"""LoRA adapters of PEFT as GGUF files, the only ones that llama.cpp reads.

Sources: ggml's docs/gguf.md for the layout, llama.cpp's convert_lora_to_gguf.py and its converters of models for the
keys, the names and the order of rows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np

from conch.backends.generation.lora import Floats, LoraWeights
from conch.checkpoints.gguf import ADAPTED, GgufFile

_LAYER: Final = re.compile(r"(?:.+\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
#: llama.cpp's names of matrices, by those of transformers.
_NAMES: Final[Mapping[str, str]] = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "gate_up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
_HEAD: Final = "lm_head"
_STRING, _FLOAT32_VALUE, _FLOAT32_TENSOR = 8, 6, 0
_ALIGNMENT: Final = 32


def gguf_adapter(weights: LoraWeights, file: GgufFile) -> bytes:
    """Return the content of a GGUF file with an adapter for the model in ``file``, whose architecture is adapted.

    Raises INVALID_ARG for a layer that the model does not have.
    """
    architecture = file.text("general.architecture")
    tensors: dict[str, Floats] = {}
    for layer, (down, up) in weights.layers.items():
        match = _LAYER.fullmatch(layer)
        if match is not None and match[2] in _NAMES:
            name = f"blk.{match[1]}.{_NAMES[match[2]]}.weight"
        elif layer == _HEAD:
            name = "output.weight"
        else:
            raise weights.misfit(f"{layer}.lora_A.weight")
        if name not in file.tensors:
            raise weights.misfit(f"{layer}.lora_A.weight")
        rows, columns = file.tensors[name].shape
        weights.check_layer(layer, columns, rows)
        tensors[f"{name}.lora_a"] = down
        tensors[f"{name}.lora_b"] = _reordered(up, name, file) if ADAPTED[architecture] else up
    # The matrices contain the scale, and llama.cpp multiplies by none if alpha is 0.
    values: dict[str, str | float] = {
        "general.architecture": architecture, "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": 0.0,
    }  # fmt: skip
    return _content(values, tensors)


def _reordered(up: Floats, name: str, file: GgufFile) -> Floats:
    """Return the rows of queries and keys in the order of a file in which neighbours are rotated together."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return up
    _, layer, kind, _ = name.split(".")
    key = f"{file.text('general.architecture')}.attention.head_count"
    counts = file.sizes(f"{key}_kv" if kind == "attn_k" else key) or file.sizes(key)
    heads = counts[int(layer)] if len(counts) > 1 else counts[0]
    return up.reshape(heads, 2, -1, up.shape[1]).swapaxes(1, 2).reshape(up.shape)


def _content(values: Mapping[str, str | float], tensors: Mapping[str, Floats]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    for key, value in values.items():
        parts.append(_text(key))
        if isinstance(value, str):
            parts += [struct.pack("<I", _STRING), _text(value)]
        else:
            parts.append(struct.pack("<If", _FLOAT32_VALUE, value))
    offset = 0
    for name, matrix in tensors.items():
        rows, columns = matrix.shape
        parts += [_text(name), struct.pack("<IQQIQ", 2, columns, rows, _FLOAT32_TENSOR, offset)]
        offset += _aligned(matrix.nbytes)
    contents = [b"".join(parts), *(np.ascontiguousarray(matrix).tobytes() for matrix in tensors.values())]
    return b"".join(content.ljust(_aligned(len(content)), b"\0") for content in contents)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
