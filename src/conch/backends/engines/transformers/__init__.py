"""The engine ``transformers``: any causal language model that transformers loads, on the CPU or a GPU.

torch and transformers are imported when ``open`` is called, in a worker.
"""

from __future__ import annotations

from importlib.util import find_spec

from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.errors import invalid, unsupported


def open(spec: EngineSpec) -> GenerationEngine:
    """Load a model.  Raises INVALID_ARG for one that cannot be loaded, UNSUPPORTED without torch and transformers."""
    if spec.draft is not None:
        raise invalid("speculative decoding is not supported by engine 'transformers'")
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise unsupported(f"engine 'transformers' needs {package}: pip install 'conch[huggingface]'")
    from conch.backends.engines.transformers.engine import TransformersEngine

    return TransformersEngine(spec)
