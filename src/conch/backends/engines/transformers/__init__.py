"""The engine ``transformers``: any causal language model that transformers loads, on the CPU or a GPU.

torch and transformers are imported when ``open`` is called, in a worker.
"""

from __future__ import annotations

from conch import extras
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.errors import invalid


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.  Raises INVALID_ARG for one that cannot be loaded, UNSUPPORTED without torch and transformers."""
    if spec.draft is not None:
        raise invalid("speculative decoding is not supported by engine 'transformers'")
    extras.require("engine 'transformers'", "torch", "transformers", *(("gguf",) if spec.gguf is not None else ()))
    if spec.adapters:
        extras.require("engine 'transformers' with LoRA adapters", "peft")
    from conch.backends.engines.transformers.engine import TransformersEngine

    return TransformersEngine(spec)
