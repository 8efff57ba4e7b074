"""Compares an engine's greedy completions at load with a reference that computes the same weights in float32.

Every engine that serves a GGUF file is compared with the weights of the file: the library of an engine may round
weights, skip unknown tensors, or ignore metadata, without an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Final

from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.checkpoints.gguf import GgufFile, other_engines
from conch.checkpoints.gguf_reference import GgufReference, TokenScores
from conch.core.errors import ConchError, invalid
from conch.core.sampling.parameters import SamplingParams

_logger = logging.getLogger(__name__)

#: Number of tokens that continue each prompt.
_TOKENS: Final = 8
#: The first request id of the comparison; ids count down, and no other requests run at that time.
_FIRST_ID: Final = -1
#: Tolerances (nats) over quantised matrices, which engines multiply with activations in int8, and over others, which
#: they multiply in 16 bits: for the mean difference of the log-probabilities, and for the lead of a token that the
#: reference prefers to the engine's. They are at least 1.8 times the largest measured ones, see docs/generation.md.
QUANTISED: Final = (0.2, 0.75)
PLAIN: Final = (0.1, 0.4)
#: The same between two computations in float32.
EXACT: Final = (0.005, 0.02)


@dataclass(slots=True)
class Completion:
    """A prompt, and an engine's tokens after it with their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def greedy_completions(
    engine: GenerationEngine, prompts: Sequence[list[int]], tokens: int = _TOKENS, limit: float = math.inf
) -> list[Completion]:
    """Return the engine's greedy ``tokens`` after each prompt, shortened to the engine's context.

    Returns an empty list if the first step takes more than ``limit`` seconds of processor time. The requests leave no
    trace in the engine. Raises the error of a request that fails.
    """
    completions: dict[int, Completion] = {}
    try:
        for id, prompt in zip(range(_FIRST_ID, _FIRST_ID - len(prompts), -1), prompts, strict=True):
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
            sampling.temperature = 0.0
            sampling.make_greedy()
            completions[id] = Completion(prompt[: max(1, engine.context - tokens - 1)], [], [])
            engine.add(EngineRequest(id, completions[id].prompt, sampling))
        # Processor time, so that a busy machine does not skip the comparison.
        began = process_time()
        while engine.busy:
            for step in engine.step():
                if step.error is not None:
                    raise step.error
                completions[step.id].tokens += step.tokens
                completions[step.id].logprobs += [entry.logprob for entry in step.logprobs or ()]
            if process_time() - began > limit:
                return []
            limit = math.inf
    except ConchError as error:
        raise error.prefixed(f"engine '{engine.name}' fails on a prompt of the comparison at load: ") from error
    finally:
        for id in completions:
            engine.cancel(id)
        engine.forget()
    return list(completions.values())


def require_agreement(
    engine: GenerationEngine,
    source: Path,
    tolerances: tuple[float, float],
    completions: Sequence[Completion],
    scores: Sequence[Sequence[TokenScores]],
    *,
    others: str = "another engine",
) -> str:
    """Compare completions with the ``scores`` of a reference for the weights ``source``; returns the result as text.

    ``scores`` has those of each completion's tokens. Raises INVALID_ARG beyond the ``tolerances``, with the advice to
    use ``others``, and for scores that are not finite numbers.
    """
    mean_tolerance, lead_tolerance = tolerances
    differences: list[float] = []
    agreeing = 0
    if not all(math.isfinite(score.logprob) for tokens in scores for score in tokens):
        raise invalid(f"the weights of {source} give log-probabilities that are not finite numbers")
    for completion, tokens in zip(completions, scores, strict=True):
        for position, (score, logprob) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            lead = score.best_logprob - score.logprob
            if lead > lead_tolerance:
                raise _unlike(
                    engine,
                    source,
                    f"after a prompt of {len(completion.prompt)} tokens, token {position} is {score.token} instead of "
                    f"{score.best}, whose log-probability is greater by {lead:.2f}",
                    others,
                )
            agreeing += score.token == score.best
            differences.append(abs(logprob - score.logprob))
    mean = fmean(differences)
    result = f"{agreeing} of {len(differences)} tokens agree, log-probabilities differ by {mean:.4f} on average"
    if not mean <= mean_tolerance:
        raise _unlike(engine, source, result, others)
    _logger.info("%s reproduces the outputs of %s: %s", engine.name, source, result)
    return result


def _unlike(engine: GenerationEngine, source: Path, why: str, others: str) -> ConchError:
    return invalid(
        f"engine '{engine.name}' does not reproduce the outputs of {source}: {why}; set parameter 'engine' to "
        f"{others}, or 'verify_on_load' to false to serve it anyway"
    )


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
