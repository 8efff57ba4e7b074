"""Batchers over the fake decoder, and the results of requests without a batcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.batching.batcher import InFlightBatcher
from conch.backends.batching.decoder import Logits
from conch.backends.batching.sampler import BeamSearch
from conch.backends.generation.engine import EngineRequest, EngineSpec, Progress
from conch.core.sampling.parameters import SamplingParams
from tests.fakes.decoder import FakeDecoder, logits_after

EOS = 2


class Batcher(InFlightBatcher):
    name = "fake"


class ErringDecoder(FakeDecoder):
    """A draft model: its greedy tokens are those of the fake decoder, except after ``errors`` of ten texts."""

    def __init__(self, errors: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._errors = errors

    def compute(self, tokens: list[int], wanted: int, adapter: str) -> list[Logits]:
        rows = super().compute(tokens, wanted, adapter)
        return [
            -row if sum(tokens[: len(tokens) - index]) % 10 < self._errors else row
            for index, row in zip(range(wanted - 1, -1, -1), rows, strict=True)
        ]


def batcher(decoder: FakeDecoder, *, draft: FakeDecoder | None = None, **settings: Any) -> Batcher:
    spec = EngineSpec(Path("model"), {}, (EOS,), **settings)
    return Batcher(decoder, spec, draft=draft, clock=lambda: decoder.now)


def request(id: int, prompt: list[int], *, priority: int = 0, **sampling: Any) -> EngineRequest:
    return EngineRequest(id, prompt, SamplingParams(**{"temperature": 0.0, **sampling}), priority)


def completion(prompt: list[int], sampling: SamplingParams, vocabulary: int) -> list[int]:
    """Return the greedy tokens after a prompt."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        tokens.append(int(logits_after(tokens, vocabulary, sampling.lora_name).argmax()))
        if tokens[-1] in sampling.end_ids((EOS,)):
            break
    return tokens[len(prompt) :]


def beams(prompt: list[int], sampling: SamplingParams, vocabulary: int) -> list[list[int]]:
    """Return the tokens of each beam after a prompt."""
    search = BeamSearch(prompt, sampling, sampling.end_ids((EOS,)), sampling.max_tokens)
    while not search.done:
        search.advance(
            np.array([logits_after([*prompt, *beam.tokens], vocabulary, sampling.lora_name) for beam in search.running])
        )
    return [beam.tokens for beam in search.results()]


def expected(engine_request: EngineRequest, vocabulary: int) -> list[list[int]]:
    """Return the tokens of a request, by beam."""
    sampling = engine_request.sampling
    if sampling.beam_width > 1:
        return beams(engine_request.prompt, sampling, vocabulary)
    return [completion(engine_request.prompt, sampling, vocabulary)]


def collect(progress: list[Progress], completions: dict[int, dict[int, list[int]]]) -> None:
    """Add the tokens of a step to the completions, by request and beam."""
    for step in progress:
        assert step.error is None, step.error
        completions.setdefault(step.id, {}).setdefault(step.beam, []).extend(step.tokens)


def run(engine: Batcher, *requests: EngineRequest, max_steps: int = 10_000) -> dict[int, list[list[int]]]:
    """Add requests and step until all have ended; returns their tokens by beam."""
    completions: dict[int, dict[int, list[int]]] = {}
    for engine_request in requests:
        engine.add(engine_request)
    for _ in range(max_steps):
        if not engine.busy:
            break
        collect(engine.step(), completions)
    assert not engine.busy
    return {id: list(tokens.values()) for id, tokens in completions.items()}
