"""Compares an engine with ``generate`` of transformers over the same network, when a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import process_time
from typing import Any, Final

import torch
import transformers

from conch.backends.engines.transformers.network import DecoderNetwork
from conch.backends.generation.engine import EngineRequest, GenerationEngine
from conch.backends.native.likeness import SLOW_STEP, VERIFIED_TOKENS, greedy_difference, tie_of, unlike
from conch.errors import one_line
from conch.sampling.parameters import SamplingParams

_logger = logging.getLogger(__name__)

#: Requests of the comparison, which no other request is under way beside.
_FIRST_ID: Final = -1


def verify(engine: GenerationEngine, network: DecoderNetwork, prompts: Sequence[list[int]]) -> None:
    """Answer ``prompts`` (token ids) together on the engine and each alone by ``generate``, greedily.

    Raises INVALID_ARG where an answer differs or ``generate`` fails.  Nothing is compared where it is not cheap.
    """
    served = _served(engine, prompts)
    if served is None:
        _logger.info("not compared with transformers: a step takes more than %s s on each core", SLOW_STEP)
        return
    network.use("")
    tie = tie_of(str(network.model.dtype).removeprefix("torch."))
    for prompt, tokens in zip(prompts, served, strict=True):
        try:
            wanted, logits = _generated(network, prompt)
        except Exception as error:
            raise unlike(f"transformers itself fails: {type(error).__name__}: {one_line(error)}") from error
        if difference := greedy_difference(tokens, wanted, logits, tie):
            raise unlike(f"after a prompt of {len(prompt)} tokens in a batch of {len(prompts)}, {difference}")


def _served(engine: GenerationEngine, prompts: Sequence[list[int]]) -> list[list[int]] | None:
    """The engine's tokens after each prompt; None where the first step took too much."""
    answers: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=VERIFIED_TOKENS, ignore_eos=True)
        sampling.temperature = 0.0
        sampling.make_greedy()
        engine.add(EngineRequest(_FIRST_ID - place, prompt, sampling))
        answers[_FIRST_ID - place] = []
    try:
        # Not by the clock: a busy machine is no reason to leave the comparison out.
        before = process_time()
        for step in engine.step():
            answers[step.id] += step.tokens
        if process_time() - before > SLOW_STEP * torch.get_num_threads():
            return None
        while engine.busy:
            for step in engine.step():
                answers[step.id] += step.tokens
    finally:
        for id in answers:
            engine.cancel(id)
    return list(answers.values())


def _generated(network: DecoderNetwork, prompt: list[int]) -> tuple[list[int], list[Any]]:
    """The greedy tokens of ``generate`` after a prompt, and the logits ``[vocabulary]`` of each."""
    ids = torch.tensor([prompt], device=network.device)
    with torch.inference_mode(), _plain(network.model):
        given = network.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=VERIFIED_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return given.sequences[0, len(prompt) :].tolist(), [row[0] for row in given.logits]


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """Without what generation_config.json says of penalties, beams and ends, which are not the network's."""
    kept = model.generation_config
    model.generation_config = transformers.GenerationConfig(use_cache=kept.use_cache)
    try:
        yield
    finally:
        model.generation_config = kept
