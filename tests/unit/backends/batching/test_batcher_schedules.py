"""Random schedules: the tokens of a request do not depend on other requests, and no slot or block is lost."""

from __future__ import annotations

import random

import pytest

from conch.backends.generation.engine import EngineRequest
from conch.core.sampling.parameters import SamplingParams
from tests.fakes.decoder import FakeDecoder
from tests.unit.backends.batching.batches import ErringDecoder, batcher, collect, expected

VOCABULARY = 31


def _prompt(chance: random.Random, prefixes: list[list[int]]) -> list[int]:
    prefix = chance.choice(prefixes)
    prompt = prefix[: chance.choice((len(prefix), chance.randint(0, len(prefix))))]
    return prompt + [chance.randrange(3, VOCABULARY) for _ in range(chance.choice((1, 2, 5, 9)))]


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 300))]
)
def test_tokens_are_those_of_the_request_alone(seed: int) -> None:
    chance = random.Random(seed)
    adapters = chance.choice(((), (), ("upper", "lowercase")))
    decoder = FakeDecoder(
        vocabulary=VOCABULARY,
        slots=chance.choice((1, 4, 12, 24)),
        blocks=chance.choice((17, 20, 30, 200)),
        batched_tokens=chance.choice((4, 9, 40)),
        context=96,
        rewinds=chance.random() < 0.8,
        adapters=adapters,
        seconds=lambda chunks: sum(len(chunk.tokens) for chunk in chunks) * 0.001 + 0.003,
    )
    if chance.random() < 0.5:
        decoder.retained_tokens = chance.choice((0, 8, 40))
        decoder.saved_bytes = chance.choice((0, 30, 100, 1000))
    speculative = chance.choice(("", "", "ngram", "draft_model")) if decoder.rewinds else ""
    draft = None
    if speculative == "draft_model":
        draft = ErringDecoder(
            chance.choice((0, 2, 7)),
            vocabulary=VOCABULARY,
            blocks=chance.choice((9, 200)),
            batched_tokens=12,
            context=60,
        )
    engine = batcher(
        decoder,
        draft=draft,
        speculative=speculative,
        draft_tokens=chance.choice((0, 1, 3, 12)),
        max_sequences=chance.choice((0, 1, 4, 12)),
        max_batched_tokens=chance.choice((0, 0, 3, 16)),
        prefix_caching=chance.random() < 0.8,
        batch_invariant=not speculative and chance.random() < 0.2,
    )
    prefixes = [[chance.randrange(3, VOCABULARY) for _ in range(chance.choice((3, 12, 30)))] for _ in range(3)]
    requests = {}
    for id in range(chance.choice((3, 10, 25))):
        width = chance.choice((1, 1, 1, 2, 4)) if decoder.rewinds else 1
        width = width if width <= engine.max_sequences else 1
        prompt = _prompt(chance, prefixes)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=chance.randint(1, 14 if width > 1 else 34),
            beam_width=width,
            n=chance.randint(1, width),
            lora_name=chance.choice(("", *adapters)),
            ignore_eos=chance.random() < 0.5,
        )
        length = len(prompt) + sampling.max_tokens
        if length <= engine.context and width * (length + decoder.block_tokens) <= engine.cache_tokens:
            requests[id] = EngineRequest(id, prompt, sampling, priority=chance.choice((0, 0, 1)))
    coming = list(requests.values())
    cancelled = set()
    completions: dict[int, dict[int, list[int]]] = {}
    steps = 0
    while coming or engine.busy:
        steps += 1
        assert steps < 5000
        for _ in range(chance.choice((0, 0, 1, 8))):
            if coming:
                engine.add(coming.pop())
        if requests and chance.random() < 0.02:
            id = chance.choice(list(requests))
            if requests[id] not in coming:
                engine.cancel(id)
                cancelled.add(id)
        collect(engine.step(), completions)
        usage = engine.usage()
        assert usage.used_tokens <= engine.cache_tokens
        assert usage.running <= engine.max_sequences
        assert len(decoder.lengths) <= decoder.slots
    for id, engine_request in requests.items():
        if id not in cancelled:
            assert list(completions[id].values()) == expected(engine_request, VOCABULARY), id
    assert engine.usage().used_tokens == 0
    assert engine.usage().running == engine.usage().waiting == 0
    engine.close()
    assert decoder.lengths == {}
    assert decoder.closed
    assert draft is None or (draft.closed and draft.lengths == {})
