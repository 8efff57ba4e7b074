"""Compares an engine's greedy completions at load with a reference that computes the same weights in float32."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Final

from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.checkpoints.gguf_reference import TokenScores
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

    ``scores`` has those of each completion's tokens. Raises INVALID_ARG beyond the ``tolerances``; the message advises
    to use ``others``.
    """
    mean_tolerance, lead_tolerance = tolerances
    differences: list[float] = []
    agreeing = 0
    for completion, tokens in zip(completions, scores, strict=True):
        for position, (score, logprob) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            lead = score.best_logprob - score.logprob
            if lead > lead_tolerance:
                raise _unlike(
                    engine,
                    source,
                    f"after a prompt of {len(completion.prompt)} tokens, token {position} is {score.token} and not "
                    f"{score.best}, whose log-probability is greater by {lead:.2f}",
                    others,
                )
            agreeing += score.token == score.best
            differences.append(abs(logprob - score.logprob))
    mean = fmean(differences)
    result = f"{agreeing} of {len(differences)} tokens agree, log-probabilities differ by {mean:.4f} on average"
    if not mean <= mean_tolerance:
        raise _unlike(engine, source, result, others)
    _logger.info("%s computes the weights of %s: %s", engine.name, source, result)
    return result


def _unlike(engine: GenerationEngine, source: Path, why: str, others: str) -> ConchError:
    return invalid(
        f"engine '{engine.name}' does not compute the weights of {source}: {why}; set parameter 'engine' to {others}, "
        "or 'verify_on_load' to false to serve it anyway"
    )
