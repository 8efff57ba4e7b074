"""The engine ``transformers``: runs any causal language model of transformers, on the CPU or a GPU.

torch and transformers are imported when ``open`` is called, in a worker.
"""

from __future__ import annotations

from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.backends.generation.features import SPECULATIVE_ENGINES, listed
from conch.core.errors import invalid
from conch.machine import extras


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.

    Raises INVALID_ARG for a model that cannot be loaded, UNSUPPORTED if torch or transformers is not installed.
    """
    if spec.speculative:
        raise invalid(
            f"speculative decoding is not supported by engine 'transformers'; {listed(SPECULATIVE_ENGINES)} support it"
        )
    extras.require("engine 'transformers'", "torch", "transformers", *(("gguf",) if spec.gguf is not None else ()))
    if spec.adapters:
        extras.require("engine 'transformers' with LoRA adapters", "peft")
    from conch.backends.engines.transformers.engine import TransformersEngine

    return TransformersEngine(spec)
