"""Compares vLLM at load with transformers, which computes the same checkpoint in float32 on the CPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from conch.backends.base.verification import SLOW_STEP
from conch.backends.generation.agreement import (
    EXACT,
    PLAIN,
    QUANTISED,
    Completion,
    greedy_completions,
    require_agreement,
)
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.checkpoints.gguf_reference import TokenScores
from conch.core.errors import ConchError, one_line
from conch.machine.memory import free_memory

_logger = logging.getLogger(__name__)

#: Engine arguments with which vLLM computes something else than the checkpoint does in transformers.
_CHANGING: Final = (
    "hf_overrides", "kv_cache_dtype", "load_format", "logits_processors", "logprobs_mode", "model_class_overrides",
    "model_weights", "quantization", "quantization_config",
)  # fmt: skip
#: The weights that a core reads in a second (bytes), to estimate the time of a step.
_SPEED: Final = 4 << 30


def verify(engine: GenerationEngine, spec: EngineSpec, prompts: Sequence[list[int]]) -> str:
    """Compare greedy completions of ``prompts`` (token ids) with transformers; returns the result as text.

    A model that transformers cannot compute, or not cheaply, is not compared; the log has the reason. Raises
    INVALID_ARG if tokens or log-probabilities differ by more than the tolerances.
    """
    reason = _obstacle(spec)
    if not reason:
        completions = greedy_completions(engine, prompts)
        try:
            scores = _score(spec, completions)
        except Exception as error:  # transformers may lack the architecture, a quantised layer, or memory
            reason = error.message if isinstance(error, ConchError) else f"{type(error).__name__}: {one_line(error)}"
    if reason:
        _logger.warning("%s was not compared with transformers: %s", spec.source, reason)
        return f"not checked: {reason}"
    if "quantization_config" in spec.config:
        tolerances = QUANTISED
    else:
        tolerances = EXACT if engine.precision == "float32" else PLAIN
    return require_agreement(engine, spec.source, tolerances, completions, scores)


def _obstacle(spec: EngineSpec) -> str:
    """Return why a comparison is not possible or takes too long; empty if nothing is known to prevent it."""
    changing = next((name for name in _CHANGING if spec.arguments.get(name) not in (None, "auto")), None)
    if changing is not None:
        return f"the engine argument '{changing}' changes what vLLM computes"
    size = _float32_size(spec.directory, spec.config)
    if size > SLOW_STEP * _SPEED * spec.threads:
        return f"a step in float32 takes more than about {SLOW_STEP} s on each core"
    if 2 * size > free_memory().available:
        return f"in float32 it has {size >> 20} MiB, which is more than half of the free memory"
    return ""


def _float32_size(directory: Path, config: Any) -> int:
    """Estimate the size of a checkpoint in float32 (bytes)."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return sum(file.stat().st_size for file in files) * (1 if stored.endswith("32") else 2)


def _score(spec: EngineSpec, completions: Sequence[Completion]) -> list[list[TokenScores]]:
    """Return what transformers computes for the tokens of each completion."""
    import torch

    from conch.backends.engines.transformers.network import load

    model = load(replace(spec, device="cpu", dtype="float32", adapters={}, draft=None, arguments={})).model
    scores = []
    with torch.inference_mode():
        for completion in completions:
            ids = torch.tensor([[*completion.prompt, *completion.tokens]])
            rows = model(ids).logits[0, len(completion.prompt) - 1 : -1].float().log_softmax(-1)
            scores.append(
                [
                    TokenScores(token, float(row[token]), int(row.argmax()), float(row.max()))
                    for token, row in zip(completion.tokens, rows, strict=True)
                ]
            )
    del model
    gc.collect()
    return scores
