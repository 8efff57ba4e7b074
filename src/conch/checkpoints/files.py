"""Checks that a folder contains a complete checkpoint, before a library loads it.

Used by folder.py and hub.py when a checkpoint is opened; only reads files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from conch.config.reading import gguf_files, open_regular, read_json
from conch.core.errors import invalid

#: Graph files in a folder that was not written by ``conch convert``, in order of preference.
_GRAPHS: Final = {
    "onnxruntime": ("model.onnx", "onnx/model.onnx"),
    "openvino": ("openvino_model.xml", "model.xml", "openvino/openvino_model.xml"),
}
_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_VOCABULARIES: Final = (
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "spm.model", "source.spm", "prophetnet.tokenizer", "tekken.json", "bpe.codes",
)  # fmt: skip
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Tokenizers of bytes or characters; they have no vocabulary file.
_OF_BYTES: Final = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_POINTER: Final = b"version https://git-lfs"
#: The maximum header size of a safetensors file in bytes, as in the safetensors library.
_MOST_HEADER: Final = 100_000_000
#: The suffix of files that contain a model with its tokenizer and configuration.
GGUF: Final = ".gguf"


def graph_file(folder: Path, engine: str) -> Path | None:
    """Return the ONNX or OpenVINO file for ``engine``, or None if the folder has none."""
    return next((folder / name for name in _GRAPHS.get(engine, ()) if (folder / name).is_file()), None)


def engines_of(folder: Path) -> tuple[str, ...]:
    """Return the engines for which the folder has weights, best first.

    A graph next to ``config.json`` precedes PyTorch weights. A graph in a subfolder, which is common on the Hub,
    follows them.
    """
    graphs = {engine: graph for engine in _GRAPHS if (graph := graph_file(folder, engine)) is not None}
    chosen = [engine for engine, graph in graphs.items() if graph.parent == folder]
    offered = [engine for engine in graphs if engine not in chosen]
    return (*chosen, *(["torch"] if _torch_weights(folder) else []), *offered)


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder with a single model and no other weights, else None.

    A projector may be beside it. It is the first file of a model that was split.

    Raises INVALID_ARG for several GGUF files in a folder without ``config.json``.
    """
    models, projectors = gguf_files(folder)
    files = models or projectors
    if not files or (folder / "conch.json").is_file() or engines_of(folder):
        return None
    if len(files) > 1 and not (folder / "config.json").is_file():
        names = ", ".join(path.name for path in files[:3])
        raise invalid(f"checkpoint {folder} has {len(files)} GGUF files: set parameter 'model' to one of {names}")
    return files[0] if len(files) == 1 else None


def projector_file(gguf: Path) -> Path | None:
    """Return the projector beside a GGUF file if there are no other models in the folder, else None.

    Raises INVALID_ARG for several projectors.
    """
    models, projectors = gguf_files(gguf.parent)
    if len(models) != 1 or not projectors:
        return None
    if len(projectors) > 1:
        names = ", ".join(path.name for path in projectors[:3])
        raise invalid(f"{gguf.parent} has {len(projectors)} projectors: set parameter 'mmproj' to one of {names}")
    return projectors[0]


def require_weights(folder: Path, engine: str) -> dict[str, list[int]]:
    """Raise INVALID_ARG, naming the folder and the missing file, unless it has the weights for ``engine``.

    Returns the tensor shapes in safetensors files, by tensor name.
    """
    present = engines_of(folder)
    if not present or (engine != "auto" and engine not in present):
        expected = {
            "onnxruntime": "model.onnx",
            "openvino": "openvino_model.xml with its .bin",
        }.get(engine, "model.safetensors or pytorch_model.bin")
        foreign = _first(folder, "tf_model.h5", "flax_model.msgpack", "*.gguf", "*.ckpt*")
        beside = f"; the format of '{foreign.name}' is not supported here" if foreign is not None else ""
        purpose = "" if engine == "auto" else f" for engine '{engine}'"
        remedy = " (conch convert writes it)" if present and engine in ("onnxruntime", "openvino") else ""
        raise invalid(f"checkpoint {folder} has no weights{purpose}: {expected} is missing{remedy}{beside}")
    chosen = present[0] if engine == "auto" else engine
    shapes: dict[str, list[int]] = {}
    if chosen == "torch":
        _require_shards(folder)
        for path in _torch_weights(folder):
            shapes.update(_checked_shapes(path))
    graph = graph_file(folder, chosen)
    if chosen == "openvino" and graph is not None and not graph.with_suffix(".bin").is_file():
        raise invalid(f"checkpoint {folder} lacks {graph.with_suffix('.bin').name}, the weights of {graph.name}")
    return shapes


def require_tokenizer(folder: Path) -> None:
    """Raise INVALID_ARG, naming the folder, unless it contains a tokenizer."""
    if any((folder / name).is_file() for name in _VOCABULARIES) or _first(folder, "*.tiktoken", "*.model"):
        return
    settings = json_object(folder / "tokenizer_config.json")
    if settings.get("auto_map") or str(settings.get("tokenizer_class")) in _OF_BYTES:
        return
    raise invalid(f"checkpoint {folder} has no tokenizer: tokenizer.json (or vocab.txt, spiece.model …) is missing")


def require_processor(folder: Path, task: str) -> None:
    """Raise INVALID_ARG, naming the folder, unless it contains a processor configuration for images or audio."""
    if not any((folder / name).is_file() for name in _PROCESSORS):
        raise invalid(
            f"checkpoint {folder} lacks {_PROCESSORS[0]}, which task '{task}' needs: is it a checkpoint for text?"
        )


def _torch_weights(folder: Path) -> list[Path]:
    """Return the weight files that transformers would read: safetensors, or else pickled files."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _require_shards(folder: Path) -> None:
    if (folder / "model.safetensors").is_file():
        return
    for name in _INDEXES:
        index = json_object(folder / name)
        shards = sorted({str(shard) for shard in index.get("weight_map", {}).values()})
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise invalid(
                f"checkpoint {folder} lacks {', '.join(missing[:3])}, of {len(shards)} files that {name} lists"
            )
        if shards:
            return


def _checked_shapes(path: Path) -> dict[str, list[int]]:
    """Return the tensor shapes in a safetensors file; empty for other weight files.

    Raises INVALID_ARG for a Git LFS pointer and for an invalid or truncated safetensors file.
    """
    try:
        opened = open_regular(path)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from None
    with opened as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            raise invalid(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' there")
        if path.suffix != ".safetensors":
            return {}
        length = int.from_bytes(start[:8], "little")
        size = path.stat().st_size
        header: Any = None
        if 2 <= length <= size - 8:
            file.seek(8)
            try:
                header = json.loads(file.read(min(length, _MOST_HEADER)))
            except (ValueError, RecursionError):
                header = None
    if not isinstance(header, dict):
        raise invalid(f"{path} is not a safetensors file, or it was cut off in its header")
    header.pop("__metadata__", None)
    try:
        expected_size = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        shapes = {name: tensor["shape"] for name, tensor in header.items()}
    except (LookupError, TypeError):
        raise invalid(f"{path} is not a safetensors file: its header is invalid") from None
    if size < expected_size:
        raise invalid(f"{path} was cut off: it has {size} of {expected_size} bytes")
    return shapes


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty for a file that is missing, invalid or holds another value."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _first(folder: Path, *patterns: str) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)
