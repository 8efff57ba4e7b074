"""Sampling by the engine ``transformers``: the tokens of ``generate``, and requests that do not affect each other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from conch.backends.generation.engine import EngineRequest
from conch.core.sampling.parameters import SamplingParams
from tests.unit.backends.engines.driving import finished_by_id, generate, tokens
from tests.unit.backends.engines.transformers.models import generated, opened, reference


def test_a_seed_gives_the_same_tokens_whoever_is_in_the_batch(folder: Path) -> None:
    engine = opened(folder)
    for settings in ({}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"seed": 2**64 - 1}):
        asked = {"seed": 5, "max_tokens": 12, "ignore_eos": True, **settings}
        alone = generate(engine, [3, 4, 5], **asked)
        assert alone == generate(engine, [3, 4, 5], **asked)
        others = [
            EngineRequest(
                number, [number] * number, SamplingParams(max_tokens=9, top_k=number - 3, top_p=0.5 + number / 20)
            )
            for number in range(3, 9)
        ]
        done = finished_by_id(engine, *others, EngineRequest(0, [3, 4, 5], SamplingParams(**asked)))
        assert tokens(done[0]) == alone
    assert generate(engine, [3, 4, 5], seed=6, max_tokens=12) != generate(engine, [3, 4, 5], seed=5, max_tokens=12)


def test_penalties_and_lengths_are_those_of_generate(folder: Path) -> None:
    model, engine = reference(folder), opened(folder)
    prompt = [3, 4, 5, 6, 7]
    assert (
        generate(engine, prompt, temperature=0, max_tokens=20, repetition_penalty=1.7)
        == generated(model, prompt, max_new_tokens=20, repetition_penalty=1.7)[0]
    )
    first = generated(model, prompt, max_new_tokens=20)[0]
    stop = first[4]
    assert (
        generate(engine, prompt, temperature=0, max_tokens=20, stop_token_ids=(stop,)) == first[: first.index(stop) + 1]
    )
    assert generate(engine, prompt, temperature=0, max_tokens=20, end_id=stop) == first[: first.index(stop) + 1]
    longer = generate(engine, prompt, temperature=0, max_tokens=20, end_id=stop, min_tokens=12)
    assert len(longer) >= 12
    assert stop not in longer[:11]


def test_log_probabilities_are_of_the_raw_logits(folder: Path) -> None:
    model, engine = reference(folder), opened(folder)
    prompt = [3, 4, 5]
    asked = SamplingParams(max_tokens=6, temperature=0, logprobs=3, logit_bias={9: 50.0}, ignore_eos=True)
    others = EngineRequest(1, [7, 8], SamplingParams(max_tokens=6, temperature=0))
    done = finished_by_id(engine, EngineRequest(0, prompt, asked), others)
    assert all(progress.logprobs is None for progress in done[1])
    known = list(prompt)
    for progress in done[0]:
        with torch.inference_mode():
            wanted = model(torch.tensor([known])).logits[0, -1].log_softmax(-1)
        [token] = progress.tokens
        assert token == 9
        assert progress.logprobs is not None
        [found] = progress.logprobs
        assert found.logprob == pytest.approx(float(wanted[9]), abs=1e-4)
        assert found.rank == int((wanted > wanted[9]).sum()) + 1
        assert [one[0] for one in found.top] == wanted.topk(3).indices.tolist()
        assert [one[1] for one in found.top] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-4)
        known.append(token)
