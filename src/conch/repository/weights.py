"""How large the weights of a model version are, from the sizes of its files, before anything loads them.

Reads directories and ``model.json``, nothing of the weights; the server calls it in a thread.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.config.reading import read_json

#: The parameters that may name a checkpoint, and a path's placeholder for the model's directory.
_CHECKPOINT: Final = ("model", "gpt_model_path")
_MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"
#: Where a folder has graphs beside PyTorch's weights.
_FOLDERS: Final = ("", "onnx", "openvino")
#: What ``conch convert`` writes.
_MANIFEST: Final = "conch.json"
#: Other copies of the weights in the same folder.
_COPIES: Final = re.compile(r"(^consolidated|[.-](fp16|fp32|bf16)[.-]|^(training_args|optimizer|scheduler))")
#: Parts of names or values of parameters that have an engine quantise the weights.
_QUANTISING: Final = ("int8", "int4", "nf4", "fp8", "8bit", "4bit", "quantiz", "quantis")
_PART: Final = re.compile(r"-\d{5}-of-\d{5}")
#: Engines by the name that the manifest has for the files that they read, where that is another.
_KINDS: Final = {"transformers": "torch", "vllm": "torch"}
#: Precisions that the numbers of a file may be halved to when they are loaded.
_HALVED: Final = {"fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The ``files`` that a version's weights are read from, and their ``size`` (bytes); empty where none were found.

    ``least`` is what they take at least once they are loaded: less where a parameter asks for smaller numbers.
    """

    size: int = 0
    files: tuple[Path, ...] = ()
    least: int = 0


def find_weights(
    version_directory: Path, parameters: Mapping[str, str] | None = None, *, gpu: bool = False
) -> WeightFiles:
    """The files of the variants that run of a converted model; of any other folder the smallest set that can be the
    model, where it has that in several forms or precisions.  ``gpu``: it is for a GPU.

    The folder is the version's, or the one that ``model.json`` or ``parameters`` name, also in the cache of the Hugging
    Face Hub.  What cannot be read counts as if it were not there.
    """
    try:
        options = {**_model_file(version_directory), **(parameters or {})}
        place = _checkpoint(version_directory, options)
        served = _served(place, options, gpu) if place.is_dir() else None
        if served is not None:
            return served
        forms = [[place]] if place.is_file() else _forms(place)
        found = [_summed(files, _divisor(options)) for files in forms]
    except (OSError, ValueError, RuntimeError, AttributeError, KeyError, TypeError):
        return WeightFiles()
    return min(found, key=lambda one: one.size, default=WeightFiles())


def _divisor(options: Mapping[str, object]) -> int:
    """By how much numbers can shrink when they are loaded: 32 bits to the type asked for, or to 4 bits."""
    if any(word in f"{key}={value}".lower() for key, value in options.items() for word in _QUANTISING):
        return 8
    return 2 if options.get("dtype") in ("float16", "bfloat16", "half") else 1


def _forms(folder: Path) -> Iterator[list[Path]]:
    """Each set of files of ``folder`` that may be the whole model."""
    for name in _FOLDERS:
        if not (folder / name).is_dir():
            continue
        forms: defaultdict[str, list[Path]] = defaultdict(list)
        beside: list[Path] = []
        for path in sorted((folder / name).iterdir()):
            if _COPIES.search(path.name) or not path.is_file():
                continue
            match path.suffix:
                case ".safetensors":
                    forms["safetensors"].append(path)
                case ".bin" | ".pt" | ".pth" if not path.with_suffix(".xml").is_file():
                    forms["pickled"].append(path)
                case ".bin" | ".onnx":
                    forms[path.stem].append(path)
                case ".gguf":
                    forms[_PART.sub("", path.stem)].append(path)
                case _:
                    beside.append(path)
        for key, files in forms.items():
            # Tensors that a graph keeps outside its file are named after it: model.onnx_data, model.onnx.data.
            yield [*files, *(one for one in beside if files[0].suffix == ".onnx" and one.name.startswith(f"{key}."))]


def _served(folder: Path, options: Mapping[str, object], gpu: bool) -> WeightFiles | None:
    """The files of the variants of a converted model that are going to run; None where it is none, or has none of them.

    On a GPU the checkpoint's own weights run where they are there, unless a variant or an engine is named.
    """
    document = read_json(folder / _MANIFEST) if (folder / _MANIFEST).is_file() else {}
    if not isinstance(document, dict) or not isinstance(document.get("variants"), list):
        return None
    own = next((form for form in _forms(folder) if _of_torch(form[0])), [])
    if gpu and own and not options.get("variant") and options.get("engine", "auto") == "auto":
        return _summed(own, _divisor(options))
    chosen = _chosen(document, options)
    if not chosen:
        return None
    size, files, least = 0, list[Path](), 0
    for one in chosen:
        path = str(one.get("path", ""))
        found = _summed(_graph(folder / path) if path else own, _HALVED.get(str(one.get("precision")), 1))
        size, files, least = size + found.size, [*files, *found.files], least + found.least
    # Two variants may be one file, computed in two precisions, which each of them holds.
    return WeightFiles(size, tuple(dict.fromkeys(files)), least) if files else None


def _chosen(document: Mapping[str, Any], options: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """The entries of the variants that run, as ``conch.checkpoints.manifest`` and ``folder`` choose them."""
    usable = {
        variant["name"]: variant for variant in document["variants"] if variant.get("passed") or variant.get("forced")
    }
    auto = usable.get(document.get("auto"))
    if options.get("variant"):
        return [usable[name] for name in (options["variant"],) if name in usable]
    engine = str(options.get("engine") or "auto")
    if engine != "auto":
        runs = [one for one in usable.values() if one.get("engine") == _KINDS.get(engine, engine)]
        return [auto] if auto is not None and auto in runs else sorted(runs, key=_slowness)[:1]
    beside = document.get("by_shape") or {}
    forbidden = str(options.get("by_shape", "")).lower() in ("false", "0", "no", "off")
    other = None if forbidden else usable.get(beside.get("variant"))
    return [one for one in (auto, other) if one is not None]


def _slowness(variant: Mapping[str, Any]) -> float:
    return sum(one["mean_ms"] for one in variant.get("latency") or ()) or float("inf")


def _graph(file: Path) -> list[Path]:
    """A graph's file with those of its tensors."""
    beside = (file.with_suffix(".bin"), file.with_name(f"{file.name}.data"), file.with_name(f"{file.name}_data"))
    return [one for one in (file, *beside) if one.is_file()]


def _summed(files: Sequence[Path], divisor: int) -> WeightFiles:
    size = sum(file.stat().st_size for file in files)
    return WeightFiles(size, tuple(files), size // divisor)


def _of_torch(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name.startswith("pytorch_model")


def _model_file(version_directory: Path) -> dict[str, object]:
    """The parameters in ``model.json``, empty without one.  Raises ValueError for one that is no JSON."""
    file = version_directory / "model.json"
    document = read_json(file) if file.is_file() else {}
    return document if isinstance(document, dict) else {}


def _checkpoint(version_directory: Path, options: Mapping[str, object]) -> Path:
    """The folder or file of the checkpoint; the version's directory where nothing else is named or found."""
    named = next((options[name] for name in _CHECKPOINT if options.get(name)), "")
    if not named or not isinstance(named, str):
        return version_directory
    path = Path(named.replace(_MODEL_DIRECTORY, str(version_directory.parent))).expanduser()
    candidates = (version_directory / path, version_directory.parent / path)
    return (
        next((candidate for candidate in candidates if candidate.exists()), None)
        or _snapshot(named)
        or version_directory
    )


def _snapshot(id: str) -> Path | None:
    """The copy of a model of the Hub that its cache has, as ``huggingface_hub`` lays it out."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"models--{id.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None
