"""The choice of an engine for a checkpoint, and its start.  ``engine.py`` says how to add an engine.

Runs in workers, when a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.checkpoints.folder import Checkpoint


def choose_engine(checkpoint: Checkpoint, on_gpu: bool) -> str:
    """The name of the engine that the parameter ``engine`` asks for, or else of the best for the files and the device.

    ``Checkpoint.open`` has checked the parameter.
    """
    if checkpoint.options.engine != "auto":
        return checkpoint.options.engine
    if checkpoint.variant is not None and checkpoint.variant.engine == "openvino":
        return "openvino"
    if on_gpu:
        return "vllm" if find_spec("vllm") is not None else "transformers"
    if checkpoint.gguf is not None:
        return "transformers" if checkpoint.openvino_problem else "openvino"
    return "openvino" if checkpoint.graph_file("openvino") is not None else "transformers"


def open_engine(name: str, spec: EngineSpec) -> GenerationEngine:
    """Load a model on the engine in ``conch.backends.engines`` of that name.

    Raises INVALID_ARG for a model that the engine cannot load, UNSUPPORTED without its library.
    """
    module: Any = import_module(f"conch.backends.engines.{name}")
    engine: GenerationEngine = module.open(spec)
    return engine
