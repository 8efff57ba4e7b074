"""Checks that the engine which a model would run on is installed: by its name only, nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from conch import extras
from conch.sampling import TEXT_GENERATION

#: The modules of each engine of networks.
_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("torch", "transformers"), ("torch", "transformers")),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "pytorch": ("torch",),
    "vllm": ("vllm",),
}


def engine_problem(engine: str, task: str = "") -> tuple[str, str]:
    """What the engine lacks here and the command that installs it; both empty where it is installed."""
    modules = _MODULES.get(engine, ())
    if engine == "openvino" and task == TEXT_GENERATION:
        modules = (*modules, "openvino_genai")
    absent = [module for module in modules if not is_installed(module)]
    if not absent:
        return "", ""
    return f"engine '{engine}' is not installed here: here the model does not load", extras.command_for(*absent)


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found."""
    return find_spec(module) is not None
