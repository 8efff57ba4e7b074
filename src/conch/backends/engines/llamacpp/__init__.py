"""The engine ``llamacpp``: runs GGUF files with llama.cpp, through the package llama-cpp-python.

The package is imported when ``open`` is called, in a worker.
"""

from __future__ import annotations

from conch.backends.batching.batcher import InFlightBatcher
from conch.backends.engines.llamacpp.decoder import LlamaDecoder
from conch.backends.generation.draft import draft_spec
from conch.backends.generation.engine import EngineSpec, GenerationEngine


class LlamaEngine(InFlightBatcher):
    """Sequences of a context of llama.cpp, batched, sampled and constrained by conch."""

    name = "llamacpp"
    library = "llama_cpp"


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.

    Raises INVALID_ARG for a model or argument that llama.cpp refuses, UNSUPPORTED if llama-cpp-python is not installed.
    """
    decoder = LlamaDecoder(spec)
    draft = LlamaDecoder(draft_spec(spec, "llamacpp")) if spec.speculative == "draft_model" else None
    return LlamaEngine(decoder, spec, draft=draft)
