"""GGUF files, written on the spot."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: The types of metadata by what a value begins with: (type, struct's name for it).
_NUMBERS: Final = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
LLAMA: Final[dict[str, Any]] = {
    "general.architecture": "llama",
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


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


def write(path: Path, metadata: Mapping[str, Any], **given: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(metadata, **given))
    return path
