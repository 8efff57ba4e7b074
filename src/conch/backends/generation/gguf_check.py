"""Compares an engine at load with the weights of its GGUF file, decoded and computed in float32.

Every engine that serves a GGUF file is checked here, whatever library reads the file: a library may round weights, skip
tensors that it does not know, or ignore metadata, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.checkpoints.gguf import GgufFile
from conch.checkpoints.gguf_reference import GgufReference, TokenScores
from conch.core.errors import ConchError, invalid
from conch.core.sampling.parameters import SamplingParams

_logger = logging.getLogger(__name__)

#: Number of tokens that continue each prompt.
_TOKENS: Final = 8
#: Limit for the processor time of the reference on each core (s); above it, the comparison is skipped.
_SECONDS: Final = 20.0
#: Tolerances (nats) over quantised matrices, which engines multiply with activations in int8, and over others, which
#: they multiply in 16 bits: for the mean difference of the log-probabilities, and for the lead of a token that the
#: reference prefers to the engine's. They are at least twice the largest measured ones, see docs/generation.md.
_QUANTISED: Final = (0.2, 0.75)
_PLAIN: Final = (0.1, 0.4)
#: The first request id of the comparison; ids count down, and no other requests run at that time.
_FIRST_ID: Final = -1


@dataclass(slots=True)
class _Completion:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def verify_gguf(engine: GenerationEngine, file: GgufFile, prompts: Sequence[list[int]], threads: int) -> str:
    """Compare greedy completions of ``prompts`` (token ids) with the weights of ``file``; returns the result as text.

    The reference uses ``threads`` cores. A file that it cannot compute, or not cheaply, is not checked; the log has the
    reason. Called before the first request. Raises INVALID_ARG if the engine's tokens or log-probabilities differ by
    more than the tolerances.
    """
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            reference = GgufReference(file, pool)
            completions = _completions(engine, prompts)
            scores = reference.score(
                [([*completion.prompt, *completion.tokens], len(completion.tokens)) for completion in completions],
                limit=_SECONDS * max(1, threads),
            )
        except ConchError as error:
            _logger.warning("%s was not compared with its weights: %s", file.path, error.message)
            return f"not checked: {error.message}"
    return _compare(engine, file, completions, scores)


def _completions(engine: GenerationEngine, prompts: Sequence[list[int]]) -> list[_Completion]:
    """Return the engine's greedy tokens after each prompt. Raises the error of a request that fails."""
    completions: dict[int, _Completion] = {}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, logprobs=0)
        sampling.temperature = 0.0
        sampling.make_greedy()
        shortened = prompt[: engine.context - _TOKENS - 1]
        engine.add(EngineRequest(_FIRST_ID - number, shortened, sampling))
        completions[_FIRST_ID - number] = _Completion(shortened, [], [])
    try:
        while engine.busy:
            for step in engine.step():
                if step.error is not None:
                    raise step.error
                completions[step.id].tokens += step.tokens
                completions[step.id].logprobs += [entry.logprob for entry in step.logprobs or ()]
    finally:
        for id in completions:
            engine.cancel(id)
    return list(completions.values())


def _compare(
    engine: GenerationEngine,
    file: GgufFile,
    completions: Sequence[_Completion],
    scores: Sequence[Sequence[TokenScores]],
) -> str:
    mean_tolerance, lead_tolerance = _QUANTISED if file.quantised else _PLAIN
    differences: list[float] = []
    agreeing = 0
    for completion, tokens in zip(completions, scores, strict=True):
        for position, (score, logprob) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            lead = score.best_logprob - score.logprob
            if lead > lead_tolerance:
                raise _unlike(
                    engine,
                    file,
                    f"after a prompt of {len(completion.prompt)} tokens, token {position} is {score.token} and not "
                    f"{score.best}, whose log-probability is greater by {lead:.2f}",
                )
            agreeing += score.token == score.best
            differences.append(abs(logprob - score.logprob))
    mean = fmean(differences)
    result = f"{agreeing} of {len(differences)} tokens agree, log-probabilities differ by {mean:.4f} on average"
    if not mean <= mean_tolerance:
        raise _unlike(engine, file, result)
    _logger.info("%s computes the weights of %s: %s", engine.name, file.path, result)
    return result


def _unlike(engine: GenerationEngine, file: GgufFile, why: str) -> ConchError:
    return invalid(
        f"engine '{engine.name}' does not compute the weights of {file.path}: {why}; set parameter 'engine' to another "
        "engine, or 'verify_on_load' to false to serve it anyway"
    )
