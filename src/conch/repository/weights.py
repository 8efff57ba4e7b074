"""Finds the weight files of a model version and their size before the model is loaded.

Reads directories and ``model.json``, but not the weights. The server calls it in a thread.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conch.config.reading import gguf_files, gguf_parts, read_json

#: Parameters that may name a checkpoint, and the placeholder for the model's directory in a path.
_CHECKPOINT: Final = ("model", "gpt_model_path")
_MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"
#: Subfolders of a checkpoint that may hold graphs in addition to PyTorch weights.
_FOLDERS: Final = ("", "onnx", "openvino")
#: The manifest that ``conch convert`` writes.
_MANIFEST: Final = "conch.json"
#: Files in a checkpoint folder that duplicate weights or belong to training.
_COPIES: Final = re.compile(r"(^consolidated|[.-](fp16|fp32|bf16)[.-]|^(training_args|optimizer|scheduler))")
#: Substrings of parameter names or values that make an engine quantize the weights.
_QUANTISING: Final = ("int8", "int4", "nf4", "fp8", "8bit", "4bit", "quantiz", "quantis")
#: Engine names in the manifest, by engine, where they differ.
_KINDS: Final = {"transformers": "torch", "vllm": "torch"}
#: Divisors for precisions that weights may be converted to at load.
_HALVED: Final = {"fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The ``files`` with a version's weights and their total ``size`` (bytes); empty if none were found.

    ``least`` is the minimum size after loading (bytes); it is less than ``size`` if parameters request smaller types.
    """

    size: int = 0
    files: tuple[Path, ...] = ()
    least: int = 0


def find_weights(
    version_directory: Path, parameters: Mapping[str, str] | None = None, *, gpu: bool = False
) -> WeightFiles:
    """Return the weight files of a version.

    For a converted model, returns the files of the variants that run. For any other folder with several formats or
    precisions, returns the smallest complete set. Includes the files of a draft model. ``gpu`` is True if the model
    runs on a GPU.

    The folder is the version directory, or the checkpoint that ``model.json`` or ``parameters`` name, which may be in
    the cache of the Hugging Face Hub. Ignores unreadable files.
    """
    try:
        options = {**_model_file(version_directory), **(parameters or {})}
        checkpoint = _checkpoint(version_directory, options)
        weights = _weights_of(checkpoint, options, gpu, _named(options, "mmproj", version_directory, checkpoint))
        draft = _named(options, "speculative_model", version_directory, checkpoint)
        if draft is None:
            return weights
        other = _weights_of(draft, {**options, "variant": ""}, gpu)
    except (OSError, ValueError, RuntimeError, AttributeError, KeyError, TypeError):
        return WeightFiles()
    return WeightFiles(weights.size + other.size, weights.files + other.files, weights.least + other.least)


def _weights_of(
    checkpoint: Path, options: Mapping[str, object], gpu: bool, projector: Path | None = None
) -> WeightFiles:
    """Return the weight files of a folder or GGUF file; ``projector`` is the one that a parameter names."""
    served = _served(checkpoint, options, gpu) if checkpoint.is_dir() else None
    if served is not None:
        return served
    forms = [_gguf_form(checkpoint, projector)] if checkpoint.is_file() else _forms(checkpoint, projector)
    sums = [_summed(files, _divisor(options)) for files in forms]
    return min(sums, key=lambda weights: weights.size, default=WeightFiles())


def _divisor(options: Mapping[str, object]) -> int:
    """Return the factor by which weights may shrink at load: from 32 bits to the requested type, or to 4 bits."""
    if any(word in f"{key}={value}".lower() for key, value in options.items() for word in _QUANTISING):
        return 8
    return 2 if options.get("dtype") in ("float16", "bfloat16", "half") else 1


def _forms(folder: Path, projector: Path | None = None) -> Iterator[list[Path]]:
    """Yield each set of files in ``folder`` that may be the complete model."""
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
                case _:
                    beside.append(path)
        for key, files in forms.items():
            # Files with a graph's external tensors are named after it: model.onnx_data, model.onnx.data.
            yield [*files, *(file for file in beside if files[0].suffix == ".onnx" and file.name.startswith(f"{key}."))]
    for model in gguf_files(folder)[0]:
        yield _gguf_form(model, projector)


def _gguf_form(gguf: Path, projector: Path | None) -> list[Path]:
    """Return the files of a GGUF model, with ``projector``, or else the one beside the only model in a folder."""
    if projector is not None:
        return [*gguf_parts(gguf), projector]
    models, projectors = gguf_files(gguf.parent)
    return [*gguf_parts(gguf), *(projectors[:1] if len(models) == 1 else ())]


def _served(folder: Path, options: Mapping[str, object], gpu: bool) -> WeightFiles | None:
    """Return the files of the variants of a converted model that will run; None for other folders or if none are found.

    On a GPU the checkpoint's own weights are used, if present, unless a variant or an engine is named.
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
    size, files, minimum = 0, list[Path](), 0
    for variant in chosen:
        path = str(variant.get("path", ""))
        weights = _summed(_graph(folder / path) if path else own, _HALVED.get(str(variant.get("precision")), 1))
        size, files, minimum = size + weights.size, [*files, *weights.files], minimum + weights.least
    # Two variants may use the same file in two precisions; each keeps its own copy in memory.
    return WeightFiles(size, tuple(dict.fromkeys(files)), minimum) if files else None


def _chosen(document: Mapping[str, Any], options: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """Return the entries of the variants that run, chosen as in ``conch.checkpoints.manifest`` and ``folder``."""
    usable = {
        variant["name"]: variant for variant in document["variants"] if variant.get("passed") or variant.get("forced")
    }
    auto = usable.get(document.get("auto"))
    if options.get("variant"):
        return [usable[name] for name in (options["variant"],) if name in usable]
    engine = str(options.get("engine") or "auto")
    if engine != "auto":
        runs = [variant for variant in usable.values() if variant.get("engine") == _KINDS.get(engine, engine)]
        return [auto] if auto is not None and auto in runs else sorted(runs, key=_slowness)[:1]
    beside = document.get("by_shape") or {}
    forbidden = str(options.get("by_shape", "")).lower() in ("false", "0", "no", "off")
    other = None if forbidden else usable.get(beside.get("variant"))
    return [variant for variant in (auto, other) if variant is not None]


def _slowness(variant: Mapping[str, Any]) -> float:
    return sum(latency["mean_ms"] for latency in variant.get("latency") or ()) or float("inf")


def _graph(file: Path) -> list[Path]:
    """Return a graph file and the files with its tensors."""
    beside = (file.with_suffix(".bin"), file.with_name(f"{file.name}.data"), file.with_name(f"{file.name}_data"))
    return [file for file in (file, *beside) if file.is_file()]


def _summed(files: Sequence[Path], divisor: int) -> WeightFiles:
    size = sum(file.stat().st_size for file in files)
    return WeightFiles(size, tuple(files), size // divisor)


def _of_torch(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name.startswith("pytorch_model")


def _model_file(version_directory: Path) -> dict[str, object]:
    """Return the parameters in ``model.json``, empty without the file. Raises ValueError for invalid JSON."""
    file = version_directory / "model.json"
    document = read_json(file) if file.is_file() else {}
    return document if isinstance(document, dict) else {}


def _checkpoint(version_directory: Path, options: Mapping[str, object]) -> Path:
    """Return the folder or file of the checkpoint; the version directory if none is named or found."""
    named = next((options[name] for name in _CHECKPOINT if options.get(name)), "")
    if not named or not isinstance(named, str):
        return version_directory
    return _existing(named, version_directory) or _snapshot(named) or version_directory


def _named(options: Mapping[str, object], parameter: str, version_directory: Path, checkpoint: Path) -> Path | None:
    """Return the file or folder that a parameter names, which may be beside the checkpoint; None if there is none."""
    named = options.get(parameter)
    if not named or not isinstance(named, str):
        return None
    return _existing(named, version_directory, checkpoint if checkpoint.is_dir() else checkpoint.parent)


def _existing(named: str, version_directory: Path, *folders: Path) -> Path | None:
    """Return the path ``named`` in the version's directory, the model's, or another folder; None if it is in none."""
    path = Path(named.replace(_MODEL_DIRECTORY, str(version_directory.parent))).expanduser()
    candidates = (folder / path for folder in (version_directory, version_directory.parent, *folders))
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _snapshot(id: str) -> Path | None:
    """Return the copy of a Hub model in the Hub's cache, laid out as by ``huggingface_hub``; None if it is missing."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"models--{id.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if snapshot.is_dir() else None
