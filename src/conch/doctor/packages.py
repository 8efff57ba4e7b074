"""The optional packages: which are installed, in which version, and the command that installs one that is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from conch.doctor.facts import PackageFact

#: By pip's name: the extra of conch that brings the package (or the package itself), and what it is for.
_OPTIONAL: Final[Mapping[str, tuple[str, str]]] = {
    "torch": ("conch[huggingface]", "checkpoints as they are"),
    "transformers": ("conch[huggingface]", "checkpoints as they are"),
    "onnxruntime": ("conch[onnxruntime]", "ONNX graphs, converted models"),
    "openvino": ("conch[openvino]", "OpenVINO graphs, converted models"),
    "openvino-genai": ("conch[openvino]", "GGUF files, converted language models"),
    "vllm": ("conch[vllm]", "language models on GPUs"),
    "nncf": ("conch[convert]", "conch convert"),
    "llguidance": ("conch[structured]", "structured output on transformers"),
    "peft": ("conch[lora]", "LoRA adapters on transformers"),
    "pillow": ("conch[image]", "images"),
    "soundfile": ("conch[audio]", "sound"),
    "nvidia-ml-py": ("nvidia-ml-py", "metrics of GPUs"),
}
#: Other packages that bring the same.
_INSTEAD: Final = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino")}


def packages() -> tuple[PackageFact, ...]:
    """Every optional package, installed or not."""
    return tuple(_fact(name, *rest) for name, rest in _OPTIONAL.items())


def version(name: str) -> str:
    """The installed version of a package by pip's name; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _fact(name: str, brought_by: str, purpose: str) -> PackageFact:
    for candidate in (name, *_INSTEAD.get(name, ())):
        if found := version(candidate):
            return PackageFact(name, found, purpose, detail=_build() if name == "torch" else "")
    return PackageFact(name, "", purpose, f'pip install "{brought_by}"')


def _build() -> str:
    """``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``: what torch was built for, read from its file of versions."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        text = (Path((folders or [""])[0]) / "version.py").read_text("utf-8")
    except OSError:
        return ""
    for name, attribute in (("CUDA", "cuda"), ("ROCm", "hip")):
        if built := re.search(rf"^{attribute}\b[^=]*= '([^']+)'", text, re.MULTILINE):
            return f"{name} {built[1]}"
    return "CPU"
