"""GGUF files, written on the spot."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: The types of metadata by what a value begins with: (type, struct's name for it).
_NUMBERS: Final = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
LLAMA: Final[dict[str, Any]] = {
    "general.architecture": "llama",
    "general.file_type": 7,
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
#: The numbers of ``llama_pooling_type``.
MEAN, CLS, LAST, RANK = 1, 2, 3, 4
_HEAD_NORMS: Final = ("attn_q_norm", "attn_k_norm")
#: Vectors of each layer besides those of Llama.
_NORMS: Final = {"qwen3": _HEAD_NORMS, "gemma2": ("post_attention_norm", "post_ffw_norm")}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(value: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        if isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        kind, form = _NUMBERS[type(value[0])]
        if kind == 4:
            kind, form = 5, "i"
        return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)
    kind, form = _NUMBERS[type(value)]
    return struct.pack(f"<I{form}", kind, value)


def content(
    metadata: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (), data: int = 0
) -> bytes:
    """A file's bytes; ``tensors`` as (name, dimensions, type, offset), with ``data`` bytes for them."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    for name, dimensions, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def model(
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[tuple[int, ...], int] | None] | None = None,
    architecture: str = "llama",
    width: int = 32,
) -> bytes:
    """The bytes of a model whose tensors are those that its metadata describes, in Q8_0 and F32.

    ``changes`` are added to the metadata, and ``tensors`` (name: dimensions, type) to the tensors; None removes one.
    """
    metadata = {key.replace("llama", architecture): value for key, value in LLAMA.items()}
    metadata |= {"general.architecture": architecture, f"{architecture}.embedding_length": width, **(changes or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    inner, keys = 64, width // 2
    made: dict[str, Any] = {
        "token_embd.weight": ((width, len(metadata.get("tokenizer.ggml.tokens", [])) or 8), 8),
        "output_norm.weight": ((width,), 0),
    }
    for block in ("blk.0.", "blk.1."):
        rows = {
            "attn_q": width,
            "attn_k": keys,
            "attn_v": keys,
            "attn_output": width,
            "ffn_gate": inner,
            "ffn_up": inner,
        }
        made |= {f"{block}{name}.weight": ((width, count), 8) for name, count in rows.items()}
        made[f"{block}ffn_down.weight"] = (inner, width), 8
        norms = ("attn_norm", "ffn_norm", *_NORMS.get(architecture, ()))
        made |= {f"{block}{name}.weight": ((width // 4 if name in _HEAD_NORMS else width,), 0) for name in norms}
    made |= tensors or {}
    placed: list[tuple[str, tuple[int, ...], int, int]] = []
    end = 0
    for name, tensor in made.items():
        if tensor is not None:
            placed.append((name, *tensor, end))
            numbers = math.prod(tensor[0])
            end += -(-(numbers // 32 * 34 if tensor[1] == 8 else 4 * numbers) // 32) * 32
    return content(metadata, placed, end)


def write_model(path: Path, *arguments: Any, **given: Any) -> Path:
    """Write the bytes of ``model`` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model(*arguments, **given))
    return path


def write(path: Path, metadata: Mapping[str, Any], **given: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(metadata, **given))
    return path


#: A small vocabulary, for files whose every part is changed.
TOKENS: Final[dict[str, Any]] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def numbers_in(data: bytes) -> list[tuple[int, int]]:
    """The places of all numbers in the header of a valid file, as (offset, bytes), in order."""
    places: list[tuple[int, int]] = []

    def number(width: int) -> int:
        start = sum(places[-1]) if places else 4
        places.append((skipped[0] or start, width))
        skipped[0] = 0
        return int.from_bytes(data[places[-1][0] : places[-1][0] + width], "little")

    skipped = [0]

    def skip_text() -> None:
        length = number(8)
        skipped[0] = sum(places[-1]) + length

    def value(kind: int) -> None:
        if kind == 8:
            skip_text()
        elif kind == 9:
            item = number(4)
            for _ in range(number(8)):
                value(item)
        else:
            number(_WIDTHS[kind])

    number(4)
    tensors, entries = number(8), number(8)
    for _ in range(entries):
        skip_text()
        value(number(4))
    for _ in range(tensors):
        skip_text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return places
