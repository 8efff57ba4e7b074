"""Engines that continue sequences, and which one runs a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from conch.backends.generation.engine import GenerationEngine

#: Where each engine is; ``open(spec)`` there loads a model.
ENGINES: Final[Mapping[str, str]] = {
    "openvino": "conch.backends.engines.openvino",
    "transformers": "conch.backends.engines.transformers",
    "vllm": "conch.backends.engines.vllm",
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is to load, and how.

    ``directory`` is a checkpoint's folder or an OpenVINO export, ``gguf`` a file in it that holds the weights,
    which ``gguf_quantised`` says are of fewer than 16 bits.
    ``config`` is config.json (of a GGUF file, what it says in its place).  ``device`` is ``cpu`` or ``cuda``,
    ``device_id`` the number of the latter; ``threads`` the cores to use.  ``dtype`` is ``auto``, ``float32``,
    ``bfloat16`` or ``float16``.  Zero means that the engine chooses, also for ``context`` (what the checkpoint says).
    ``adapters`` are LoRA adapters by name, ``draft`` the folder of a draft model for speculative decoding.
    ``arguments`` go to the engine as they are (vLLM's engine arguments, for one).
    """

    directory: Path
    config: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    gguf: Path | None = None
    gguf_quantised: bool = False
    device: str = "cpu"
    device_id: int = 0
    threads: int = 0
    dtype: str = "auto"
    trust_remote_code: bool = False
    context: int = 0
    max_sequences: int = 0
    max_batched_tokens: int = 0
    cache_tokens: int = 0
    prefix_caching: bool = True
    adapters: Mapping[str, Path] = field(default_factory=dict)
    draft: Path | None = None
    draft_tokens: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)


class _Module(Protocol):
    def open(self, spec: EngineSpec) -> GenerationEngine: ...


def open_engine(name: str, spec: EngineSpec) -> GenerationEngine:
    """Load a model.  Raises INVALID_ARG for what the engine cannot load, UNSUPPORTED where it is not installed."""
    module: Any = import_module(ENGINES[name])
    opened: _Module = module
    return opened.open(spec)
