"""Folders that look like checkpoints, without a network in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.options import Options
from tests.refusals import refused_argument

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


def refusal(folder: Path, options: Options = Options()) -> str:  # noqa: B008
    """The reason why a folder does not open as a checkpoint."""
    return refused_argument(Checkpoint.open, folder, options)


def bare(folder: Path, gguf: Path | None = None) -> Checkpoint:
    """A folder, or a GGUF file in it, as a checkpoint without a look at what else it holds."""
    return Checkpoint(folder, str(folder), "", {}, Options(), gguf=read_gguf(gguf) if gguf is not None else None)
