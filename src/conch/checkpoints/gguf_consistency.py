"""Checks that the tensors of a GGUF file are those that its metadata describes.

Libraries check this late, differently, or not at all: they may crash, or invent weights. Sources of names and shapes:
llama.cpp's llama-arch.cpp and llama-model.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conch.checkpoints.gguf import GgufFile, type_name
from conch.core.errors import invalid

_EMBEDDING: Final = "token_embd.weight"
_BLOCK: Final = re.compile(r"blk\.(\d+)\.")
_FULL: Final = ("attn_norm", "ffn_norm")
_GATED: Final = ("ffn_gate",)
#: Tensors of each layer by llama.cpp's name of the architecture, except attention, ``ffn_up`` and ``ffn_down``.
#: Architectures that are not listed are not checked layer by layer.
_LAYER: Final[Mapping[str, Sequence[str]]] = {
    "llama": (*_FULL, *_GATED),
    "qwen2": (*_FULL, *_GATED),
    "qwen2moe": _FULL,
    "qwen3": (*_FULL, *_GATED, "attn_q_norm", "attn_k_norm"),
    "qwen3moe": (*_FULL, "attn_q_norm", "attn_k_norm"),
    "smollm3": (*_FULL, *_GATED),
    "phi3": _FULL,
    "gemma": (*_FULL, *_GATED),
    "gemma2": (*_FULL, *_GATED, "post_attention_norm", "post_ffw_norm"),
    "gemma3": (*_FULL, *_GATED, "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"),
    "gpt2": _FULL,
    "falcon": ("attn_norm",),
    "starcoder2": _FULL,
    "stablelm": ("attn_norm", *_GATED),
    "granite": (*_FULL, *_GATED),
    "olmo2": (*_GATED, "post_attention_norm", "post_ffw_norm"),
    "cohere": ("attn_norm", *_GATED),
    "command-r": ("attn_norm", *_GATED),
}
#: Alternatives for the names of tensors: all of one group are there.
_FUSED: Final = (("attn_qkv",), ("attn_q", "attn_k", "attn_v"))
_EXPERTS: Final = (("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), ("ffn_up", "ffn_down"))
#: Architectures whose ``ffn_up`` also has the gate.
_FUSED_GATE: Final = ("phi3",)


@dataclass(frozen=True, slots=True)
class _Size:
    """The expected size of a dimension, and the metadata from which it follows."""

    value: int
    source: str


def require_consistent(file: GgufFile) -> None:
    """Raise INVALID_ARG if tensors are missing or contradict the metadata; the message has the tensor or the key."""
    name = file.text("general.architecture")
    width = _one(file, f"{name}.embedding_length", 0)
    tokens = len(file.texts("tokenizer.ggml.tokens"))
    rows = _Size(tokens, "tokenizer.ggml.tokens") if tokens else None
    columns = _Size(width, f"{name}.embedding_length")
    _require_shape(file, _EMBEDDING, (rows, columns))
    vocabulary = _Size(file.tensors[_EMBEDDING].shape[0], f"tensor '{_EMBEDDING}'")
    if "output.weight" in file.tensors:
        _require_shape(file, "output.weight", (vocabulary, columns))
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None and (type_name(divisors.type) != "F32" or len(divisors.shape) != 1):
        raise invalid(f"{file.path}: tensor '{divisors.name}' must be a vector of type F32")
    if name in _LAYER:
        _require_shape(file, "output_norm.weight", (columns,))
        _require_layers(file, name, columns)


def _require_layers(file: GgufFile, name: str, width: _Size) -> None:
    layers = _one(file, f"{name}.block_count", 0)
    # Each layer has its own tensors, so the loop below ends soon for any number.
    blocks = {int(match[1]) for tensor in file.tensors if (match := _BLOCK.match(tensor))}
    if blocks and max(blocks) >= layers:
        raise invalid(f"{file.path}: {name}.block_count is {layers}, and there are tensors of block {max(blocks)}")
    for layer in range(layers):
        shapes = _shapes(file, name, layer, layers, width)
        for tensor in _required(file, name, f"blk.{layer}."):
            _require_shape(file, f"blk.{layer}.{tensor}.weight", shapes[tensor])


def _required(file: GgufFile, name: str, block: str) -> list[str]:
    """Return the names of the tensors that a layer needs, without prefix and suffix."""
    chosen = ["attn_output", *_LAYER[name]]
    for groups in (_FUSED, _EXPERTS):
        group = next((group for group in groups if f"{block}{group[0]}.weight" in file.tensors), groups[-1])
        chosen += group
    if "ffn_gate_inp" in chosen and "ffn_gate" in chosen:
        chosen.remove("ffn_gate")
    return chosen


def _shapes(file: GgufFile, name: str, layer: int, layers: int, width: _Size) -> Mapping[str, tuple[_Size | None, ...]]:
    """Return the shapes of the tensors of a layer; None for a size that does not follow from the metadata."""

    def size(key: str, default: int) -> int:
        return _one(file, f"{name}.{key}", default, layer, layers)

    heads = size("attention.head_count", 0)
    key_heads = size("attention.head_count_kv", heads)
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise invalid(
            f"{file.path}: {name}.attention.head_count is {heads}, which {name}.attention.head_count_kv, {key_heads}, "
            "does not divide"
        )
    key_size = size("attention.key_length", 0)
    if not key_size and width.value % heads:
        raise invalid(
            f"{file.path}: {name}.embedding_length is {width.value}, which {name}.attention.head_count, {heads}, does "
            "not divide"
        )
    key_size = key_size or width.value // heads
    if (rotated := size("rope.dimension_count", key_size)) > key_size:
        raise invalid(f"{file.path}: {name}.rope.dimension_count is {rotated}, and a head has {key_size} numbers")
    value_size = size("attention.value_length", key_size)
    queries = _Size(heads * key_size, f"{name}.attention.head_count and the size of a head")
    keys = _Size(key_heads * key_size, f"{name}.attention.head_count_kv and the size of a head")
    values = _Size(key_heads * value_size, keys.source)
    fused = _Size(queries.value + keys.value + values.value, queries.source)
    outputs = _Size(heads * value_size, queries.source)
    inner = _Size(size("feed_forward_length", 0), f"{name}.feed_forward_length")
    up = _Size(2 * inner.value, inner.source) if name in _FUSED_GATE else inner
    experts = _Size(size("expert_count", 0), f"{name}.expert_count")
    return {
        **dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (width,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (None,)),
        "attn_qkv": (fused, width), "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (values, width),
        "attn_output": (width, outputs),
        "ffn_gate": (inner, width), "ffn_up": (up, width), "ffn_down": (width, inner),
        "ffn_gate_inp": (experts, width), "ffn_gate_exps": (experts, None, width),
        "ffn_up_exps": (experts, None, width), "ffn_down_exps": (experts, width, None),
    }  # fmt: skip


def _require_shape(file: GgufFile, name: str, sizes: Sequence[_Size | None]) -> None:
    """Raise INVALID_ARG unless the file has the tensor with these sizes; None means any size."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise invalid(f"{file.path} lacks tensor '{name}'")
    if len(tensor.shape) != len(sizes):
        raise invalid(f"{file.path}: tensor '{name}' has {len(tensor.shape)} dimensions instead of {len(sizes)}")
    for found, size in zip(tensor.shape, sizes, strict=True):
        if size is not None and found != size.value:
            raise invalid(
                f"{file.path}: tensor '{name}' has shape {tensor.shape}: {size.value} is expected instead of {found}, "
                f"by {size.source}"
            )


def _one(file: GgufFile, key: str, default: int, layer: int = 0, layers: int = 1) -> int:
    """Return a size in the metadata, or that of a layer if there is one for each of ``layers``."""
    sizes = file.sizes(key)
    if len(sizes) > 1 and len(sizes) != layers:
        raise invalid(f"{file.path}: {key} has {len(sizes)} entries for {layers} layers")
    return (sizes[layer] if len(sizes) > 1 else sizes[0]) if sizes else default
