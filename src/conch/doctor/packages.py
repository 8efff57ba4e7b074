"""The optional packages: which are installed, in which version, and the command that installs one that is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from conch import extras
from conch.doctor.facts import PackageFact

#: By the name that is imported: what each is for.
_PURPOSES: Final[Mapping[str, str]] = {
    "torch": "checkpoints as they are",
    "transformers": "checkpoints as they are",
    "onnxruntime": "ONNX graphs, converted models",
    "openvino": "OpenVINO graphs, converted models",
    "openvino_genai": "GGUF files, converted language models",
    "vllm": "language models on GPUs",
    "nncf": "conch convert",
    "llguidance": "structured output on transformers",
    "peft": "LoRA adapters on transformers",
    "PIL": "images",
    "soundfile": "sound",
    "pynvml": "metrics of GPUs",
}


def packages() -> tuple[PackageFact, ...]:
    """Every optional package, installed or not."""
    return tuple(_fact(module, purpose) for module, purpose in _PURPOSES.items())


def _fact(module: str, purpose: str) -> PackageFact:
    name = extras.PACKAGES[module].name
    if find_spec(module) is None:
        return PackageFact(name, "", purpose, extras.command_for(module))
    # Another distribution may bring the module, as onnxruntime-gpu does.
    version = extras.version_of(module) or "installed"
    if needed := extras.outdated(module):
        return PackageFact(name, version, purpose, extras.command_for(module), f"older than {needed}, which is needed")
    return PackageFact(name, version, purpose, detail=_build() if module == "torch" else "")


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
