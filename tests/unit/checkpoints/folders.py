"""Folders that look like checkpoints, without a network in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: A file of safetensors that holds nothing.
WEIGHTS = (2).to_bytes(8, "little") + b"{}"


def checkpoint(folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A complete BERT encoder; ``files`` by name with ``__`` for a dot: JSON, text, bytes, or None to leave one out."""
    contents: dict[str, Any] = {
        "config.json": {"model_type": "bert", "architectures": ["BertModel"], **(config or {})},
        "tokenizer.json": {},
        "model.safetensors": WEIGHTS,
    }
    contents.update({name.replace("__", "."): content for name, content in files.items()})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if content is None:
            continue
        data = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder
