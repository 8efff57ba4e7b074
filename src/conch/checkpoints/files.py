"""Checks that a folder holds all that a checkpoint needs, before any library tries to load it.

Used by folder.py and hub.py while a checkpoint is opened; reads files and changes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.config.reading import open_regular, read_json
from conch.errors import invalid

#: The file of the graph in a folder that was not made by ``conch convert``, in the order of preference.
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
#: Tokenizers of bytes or characters, which have no file of a vocabulary.
_OF_BYTES: Final = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_POINTER: Final = b"version https://git-lfs"
#: The most bytes of the header of a file of safetensors, which is the limit of its own library.
_MOST_HEADER: Final = 100_000_000
#: The ending of a file that holds a model with its tokenizer and its configuration.
GGUF: Final = ".gguf"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf")


def graph_file(folder: Path, engine: str) -> Path | None:
    """The ONNX or OpenVINO file that ``engine`` would run, None where the folder holds none."""
    return next((folder / name for name in _GRAPHS.get(engine, ()) if (folder / name).is_file()), None)


def engines_of(folder: Path) -> tuple[str, ...]:
    """The engines that the folder has weights for, best first.

    A graph beside ``config.json`` goes before PyTorch's weights; one in a folder of its own, as repositories on the Hub
    have them beside their weights, comes after.
    """
    graphs = {engine: graph for engine in _GRAPHS if (graph := graph_file(folder, engine)) is not None}
    chosen = [engine for engine, graph in graphs.items() if graph.parent == folder]
    offered = [engine for engine in graphs if engine not in chosen]
    return (*chosen, *(["torch"] if _torch_weights(folder) else []), *offered)


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file that is the folder's model: the only one, where there are no weights of another form.

    Raises INVALID_ARG where there are several to choose from.
    """
    files = sorted(folder.glob(f"*{GGUF}"))
    if not files or (folder / "conch.json").is_file() or engines_of(folder):
        return None
    if len(files) > 1 and not (folder / "config.json").is_file():
        names = ", ".join(path.name for path in files[:3])
        raise invalid(f"checkpoint {folder} has {len(files)} GGUF files: set parameter 'model' to one of {names}")
    return files[0] if len(files) == 1 else None


def require_whole(gguf: Path) -> None:
    """Raise INVALID_ARG for one of the parts that a large GGUF file was split into."""
    if _PART.search(gguf.name):
        raise invalid(f"{gguf} is one part of a model: join them with 'llama-gguf-split --merge'")


def require_weights(folder: Path, engine: str) -> dict[str, list[int]]:
    """Raise INVALID_ARG, naming the folder and what is missing, unless it has the weights that ``engine`` needs.

    Returns the shapes of tensors by name, of those in safetensors.
    """
    present = engines_of(folder)
    if not present or (engine != "auto" and engine not in present):
        wanted = {
            "onnxruntime": "model.onnx",
            "openvino": "openvino_model.xml with its .bin",
        }.get(engine, "model.safetensors or pytorch_model.bin")
        foreign = _first(folder, "tf_model.h5", "flax_model.msgpack", "*.gguf", "*.ckpt*")
        beside = f"; '{foreign.name}' is a form that is not read here" if foreign is not None else ""
        raise invalid(f"checkpoint {folder} has no weights for engine '{engine}': {wanted} is missing{beside}")
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
    """Raise INVALID_ARG, naming the folder, unless it holds a tokenizer."""
    if any((folder / name).is_file() for name in _VOCABULARIES) or _first(folder, "*.tiktoken", "*.model"):
        return
    settings = _json_of(folder / "tokenizer_config.json")
    if settings and (settings.get("auto_map") or str(settings.get("tokenizer_class")) in _OF_BYTES):
        return
    raise invalid(f"checkpoint {folder} has no tokenizer: tokenizer.json (or vocab.txt, spiece.model …) is missing")


def require_processor(folder: Path, task: str) -> None:
    """Raise INVALID_ARG, naming the folder, unless it says how images or sound become what the network takes."""
    if not any((folder / name).is_file() for name in _PROCESSORS):
        raise invalid(
            f"checkpoint {folder} lacks {_PROCESSORS[0]}, which task '{task}' needs: is it a checkpoint for text?"
        )


def _torch_weights(folder: Path) -> list[Path]:
    """The weights that transformers would read: safetensors, or pickled ones where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _require_shards(folder: Path) -> None:
    if (folder / "model.safetensors").is_file():
        return
    for name in _INDEXES:
        index = _json_of(folder / name)
        shards = sorted({str(shard) for shard in (index or {}).get("weight_map", {}).values()})
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise invalid(
                f"checkpoint {folder} lacks {', '.join(missing[:3])}, of {len(shards)} files that {name} lists"
            )
        if shards:
            return


def _checked_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes in a file of safetensors; raises INVALID_ARG for a Git LFS pointer in its place, or one cut off."""
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
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        shapes = {name: tensor["shape"] for name, tensor in header.items()}
    except (LookupError, TypeError):
        raise invalid(f"{path} is not a safetensors file: its header is wrong") from None
    if size < wanted:
        raise invalid(f"{path} was cut off: it has {size} of {wanted} bytes")
    return shapes


def _json_of(path: Path) -> Mapping[str, Any] | None:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _first(folder: Path, *patterns: str) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)
