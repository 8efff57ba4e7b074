"""The engine ``transformers``: the same tokens as ``generate``, alone and in a busy batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from conch.backends.generation.engine import EngineRequest
from conch.core.sampling.parameters import Feature, SamplingParams
from tests.unit.backends.engines.driving import finished_by_id, generate, tokens
from tests.unit.backends.engines.transformers.models import MODELS, VOCABULARY, generated, opened, reference, write

#: Those whose rows cannot share a batch.
ALONE = {"mamba", "phi3-longrope", "rwkv"}
#: Those whose state cannot be copied.
BEAMLESS = {"rwkv"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_alone_and_in_a_busy_batch_are_those_of_generate(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    model = reference(folder)
    settings: dict[str, Any] = {"max_batched_tokens": 8, "max_sequences": 6, "prefix_caching": False}
    engine = opened(folder, **settings)
    assert engine.padded == (name not in ALONE)  # type: ignore[attr-defined]
    assert (Feature.BEAMS in engine.features) == (name not in BEAMLESS)
    chance = random.Random(3)
    asked = {
        number: (
            [chance.randrange(3, VOCABULARY) for _ in range(chance.choice((1, 2, 5, 11, 30)))],
            chance.choice((1, 3, 9, 20)),
        )
        for number in range(24)
    }
    wanted = {number: generated(model, prompt, max_new_tokens=most)[0] for number, (prompt, most) in asked.items()}
    for number in (0, 1):
        assert generate(engine, asked[number][0], max_tokens=asked[number][1], temperature=0) == wanted[number]

    cancelled = set(chance.sample(sorted(asked), 6))
    coming, in_flight = sorted(asked), set[int]()
    got: dict[int, list[int]] = {number: [] for number in asked}
    while coming or engine.busy:
        for _ in range(chance.choice((0, 0, 1, 3))):
            if coming:
                number = coming.pop(0)
                prompt, most = asked[number]
                engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=most, temperature=0)))
                in_flight.add(number)
        for number in sorted(in_flight & cancelled):
            if chance.random() < 0.3:
                engine.cancel(number)
                in_flight.discard(number)
        for progress in engine.step():
            assert progress.error is None
            assert progress.id in in_flight
            got[progress.id] += progress.tokens
            if progress.finish:
                in_flight.discard(progress.id)
                last = progress.tokens[-1] == 2
                assert progress.finish == ("stop" if last else "length")
                assert got[progress.id] == wanted[progress.id]
    assert not in_flight
    for number in set(asked) - cancelled:
        assert got[number] == wanted[number]
    load = engine.usage()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "mamba"])
@pytest.mark.parametrize(
    ("width", "settings"),
    [(2, {}), (4, {"length_penalty": 2.0}), (4, {"length_penalty": 0.0}), (3, {"early_stopping": True})],
)
def test_beams_are_those_of_generate(name: str, width: int, settings: dict[str, Any], folders: dict[str, Path]) -> None:
    model, engine = reference(folders[name]), opened(folders[name], max_batched_tokens=8)
    chance = random.Random(5)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 7, 20)]
    asked = SamplingParams(max_tokens=12, temperature=0, beam_width=width, n=width, **settings)
    done = finished_by_id(
        engine,
        *(EngineRequest(number, prompt, asked) for number, prompt in enumerate(prompts)),
        EngineRequest(9, prompts[1], SamplingParams(max_tokens=8, temperature=0)),
    )
    for number, prompt in enumerate(prompts):
        wanted = generated(model, prompt, max_new_tokens=12, num_beams=width, num_return_sequences=width, **settings)
        assert [progress.beam for progress in done[number]] == list(range(width))
        assert [list(progress.tokens) for progress in done[number]] == wanted
    assert tokens(done[9]) == generated(model, prompts[1], max_new_tokens=8)[0]


def test_a_beam_says_how_likely_it_is(folders: dict[str, Path]) -> None:
    model, engine = reference(folders["llama"]), opened(folders["llama"])
    asked = SamplingParams(max_tokens=9, temperature=0, beam_width=3, n=2)
    done = finished_by_id(engine, EngineRequest(0, [3, 4, 5], asked))[0]
    assert len(done) == 2
    for progress in done:
        ids = torch.tensor([[3, 4, 5, *progress.tokens]])
        with torch.inference_mode():
            values = model(ids).logits[0, 2:-1].log_softmax(-1)
        total = float(values.gather(1, ids[0, 3:, None]).sum())
        assert progress.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert progress.finish == ("stop" if progress.tokens[-1] == 2 else "length")
