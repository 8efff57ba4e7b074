"""Compares another engine at load with transformers, which computes the same weights in float32 on the CPU.

Used for the engine ``vllm``, and for GGUF files that conch's own reference does not compute. torch and transformers are
imported when a model is compared.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from conch.backends.base.verification import SLOW_STEP
from conch.backends.generation.agreement import (
    EXACT,
    NOT_CHECKED,
    PLAIN,
    QUANTISED,
    Completion,
    greedy_completions,
    require_agreement,
)
from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.checkpoints.gguf_reference import TokenScores
from conch.core.errors import error_text, invalid
from conch.machine import extras
from conch.machine.memory import free_memory

_logger = logging.getLogger(__name__)

#: The weights that a core reads in a second (bytes), to estimate the time of a step.
_SPEED: Final = 4 << 30


def compare(engine: GenerationEngine, spec: EngineSpec, prompts: Sequence[list[int]], obstacle: str = "") -> str:
    """Compare greedy completions of ``prompts`` (token ids) with transformers; returns the result as text.

    A model that transformers cannot compute, or not cheaply, is not compared, and neither is one with an ``obstacle``;
    the log has the reason. Raises INVALID_ARG if tokens or log-probabilities differ by more than the tolerances.
    """
    completions = greedy_completions(engine, prompts)
    try:
        if obstacle:
            raise invalid(obstacle)
        scores = _score(spec, completions)
    except Exception as error:  # transformers may lack the architecture, a quantised layer, or memory
        reason = error_text(error, short=True)
        _logger.warning("%s was not compared with transformers: %s", spec.source, reason)
        return f"{NOT_CHECKED}: {reason}"
    return require_agreement(engine, spec.source, _tolerances(engine, spec), completions, scores)


def _tolerances(engine: GenerationEngine, spec: EngineSpec) -> tuple[float, float]:
    if "quantization_config" in spec.config or (spec.gguf is not None and spec.gguf.quantised):
        return QUANTISED
    return EXACT if engine.precision == "float32" else PLAIN


def _float32_size(spec: EngineSpec) -> int:
    """Return the size of the weights in float32 (bytes); estimated from the files of a checkpoint."""
    if spec.gguf is not None:
        return 4 * sum(math.prod(tensor.shape) for tensor in spec.gguf.tensors.values())
    files = list(spec.directory.glob("*.safetensors")) or list(spec.directory.glob("*.bin"))
    stored = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or "float32")
    return sum(file.stat().st_size for file in files) * (1 if stored.endswith("32") else 2)


def _score(spec: EngineSpec, completions: Sequence[Completion]) -> list[list[TokenScores]]:
    """Return what transformers computes for the tokens of each completion.

    Raises INVALID_ARG for a model that is too large to be computed cheaply, UNSUPPORTED if a library is not installed.
    """
    size = _float32_size(spec)
    if size > SLOW_STEP * _SPEED * spec.threads:
        raise invalid(f"a step in float32 takes more than about {SLOW_STEP} s on each core")
    if 2 * size > free_memory().available:
        raise invalid(f"in float32 it has {size >> 20} MiB, which is more than half of the free memory")
    extras.require("the comparison", "torch", "transformers", *(("gguf",) if spec.gguf is not None else ()))
    import torch

    from conch.backends.engines.transformers.network import load

    model = load(
        replace(spec, device="cpu", dtype="float32", adapters={}, adapter_folders=(), draft=None, arguments={})
    ).model
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
