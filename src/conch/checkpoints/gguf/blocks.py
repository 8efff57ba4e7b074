"""Decodes quantised matrices of GGUF files to integers with a scale and minimum per group, as in OpenVINO.

Source of the layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.checkpoints.gguf.config import rope_scaling
from conch.checkpoints.gguf.reader import GgufFile, block_bytes, type_name

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix with the values ``scales * numbers + minima``.

    ``numbers`` is ``[rows, groups, size]``, with 4 or 8 ``bits`` per number; ``scales`` and ``minima`` are
    ``[rows, groups]``.
    """

    numbers: Bytes
    scales: Floats
    minima: Floats
    bits: int

    def rows(self, order: Any) -> Blocks:
        """Return the rows ``order``, in that order."""
        return Blocks(self.numbers[order], self.scales[order], self.minima[order], self.bits)


def read_blocks(rows: Bytes, kind: int) -> Blocks:
    """Decode the bytes ``[rows, bytes]`` of a matrix whose type ``kind`` is in ``DECODERS``."""
    decode = DECODERS[type_name(kind)]
    numbers, scales, minima, bits = decode(np.ascontiguousarray(rows).reshape(len(rows), -1, block_bytes(kind)))
    groups = (len(rows), -1)
    return Blocks(
        numbers.reshape(*groups, numbers.shape[-1]),
        scales.astype(np.float32).reshape(groups),
        minima.astype(np.float32).reshape(groups),
        bits,
    )


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the 16-bit float at byte ``start`` of each block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Unpack 4-bit numbers: the low halves of ``run`` bytes, then the high halves of the same bytes."""
    parts = packed.reshape(*packed.shape[:-1], -1, run)
    return np.concatenate([parts & 15, parts >> 4], -1).reshape(*packed.shape[:-1], -1)


def _q4_0(blocks: Bytes) -> tuple[Any, ...]:
    scales = _half(blocks, 0)
    return _nibbles(blocks[..., 2:], 16), scales, -8 * scales, 4


def _q4_1(blocks: Bytes) -> tuple[Any, ...]:
    return _nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2), 4


def _q8_0(blocks: Bytes) -> tuple[Any, ...]:
    scales = _half(blocks, 0)
    return blocks[..., 2:] ^ 128, scales, -128 * scales, 8


def _q4_k(blocks: Bytes) -> tuple[Any, ...]:
    low, high, mixed = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], -1)
    minima = np.concatenate([high & 63, mixed >> 4 | high >> 6 << 4], -1)
    numbers = _nibbles(blocks[..., 16:], 32)
    return numbers.reshape(*numbers.shape[:-1], 8, 32), _half(blocks, 0) * scales, -_half(blocks, 2) * minima, 4


def _q6_k(blocks: Bytes) -> tuple[Any, ...]:
    numbers = _nibbles(blocks[..., :128], 64)
    parts = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32)
    for place in range(4):
        high = parts >> 2 * place & 3
        numbers.reshape(*blocks.shape[:-1], 2, 4, 32)[..., place, :] |= high << 4
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return numbers.reshape(*numbers.shape[:-1], 16, 16), scales, -32 * scales, 8


#: Decoders by type name.
DECODERS: Final[Mapping[str, Callable[[Bytes], tuple[Any, ...]]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip

#: The values of ``model_type`` that OpenVINO GenAI 2026.4 supports in GGUF files, and the tensors that it reads.
_MODELS: Final = ("llama", "qwen2", "qwen3")
_TENSORS: Final = re.compile(
    r"((token_embd|output|output_norm)|blk\.\d+\.(attn_(norm|[qkv]|[qk]_norm|output)|ffn_(norm|gate|up|down)))\.(weight|bias)"
)


def openvino_problem(file: GgufFile, model_type: str, adapters: bool) -> str:
    """Return why engine ``openvino`` cannot serve a file with a model of this type; empty if it can.

    With ``adapters``, the model also has LoRA adapters.
    """
    if adapters:
        # GenAI does not find the layers of adapters in a graph that it builds from a GGUF file.
        return "OpenVINO GenAI ignores LoRA adapters of a GGUF file"
    if model_type not in _MODELS:
        return f"OpenVINO GenAI reads GGUF files of {', '.join(_MODELS)}, not of '{model_type}'"
    scaling, _ = rope_scaling(file)
    if scaling != "none":
        return f"OpenVINO GenAI ignores its scaling of rotary frequencies, '{scaling}'"
    for tensor in file.tensors.values():
        kind = type_name(tensor.type)
        if not _TENSORS.fullmatch(tensor.name):
            return f"OpenVINO GenAI ignores tensor '{tensor.name}'"
        if kind not in ("F16", *DECODERS) and (kind != "F32" or len(tensor.shape) > 1):
            shapes = "matrices" if kind == "F32" else "tensors"
            return f"OpenVINO GenAI does not read {shapes} of type {kind}, such as '{tensor.name}'"
    return ""
