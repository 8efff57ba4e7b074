"""Compares an engine at load with the weights of its GGUF file, decoded and computed in float32.

Every engine that serves a GGUF file is checked here. The library of an engine may round weights, skip tensors that it
does not know, or ignore metadata, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from conch.backends.generation.agreement import PLAIN, QUANTISED, greedy_completions, require_agreement
from conch.backends.generation.engine import GenerationEngine
from conch.checkpoints.gguf import GgufFile, other_engines
from conch.checkpoints.gguf_reference import GgufReference
from conch.core.errors import ConchError

_logger = logging.getLogger(__name__)

NOT_CHECKED: Final = "not checked"
#: Limit for the processor time of the reference on each core (s); above it, the comparison is skipped.
_SECONDS: Final = 20.0


def verify_gguf(
    engine: GenerationEngine,
    file: GgufFile,
    prompts: Sequence[list[int]],
    threads: int,
    *,
    adapters: Iterable[Path] = (),
) -> str:
    """Compare greedy completions of ``prompts`` (token ids) with the weights of ``file``; returns the result as text.

    The reference uses ``threads`` cores. A file that it cannot compute, or not cheaply, is not checked; the result
    begins with ``NOT_CHECKED``, and the log has the reason. Called before the first request. Raises INVALID_ARG if the
    engine's tokens or log-probabilities differ by more than the tolerances, naming the engines that may serve the file
    with these LoRA ``adapters``, and the engine's error if it fails on a prompt.
    """
    completions = greedy_completions(engine, prompts)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            scores = GgufReference(file, pool).score(
                [([*completion.prompt, *completion.tokens], len(completion.tokens)) for completion in completions],
                limit=_SECONDS * max(1, threads),
            )
        except ConchError as error:
            _logger.warning("%s was not compared with its weights: %s", file.path, error.message)
            return f"{NOT_CHECKED}: {error.message}"
    others = other_engines(file, adapters, without=engine.name)
    tolerances = QUANTISED if file.quantised else PLAIN
    return require_agreement(engine, file.path, tolerances, completions, scores, others=others)
