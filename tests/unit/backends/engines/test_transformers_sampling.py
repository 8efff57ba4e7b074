"""Choosing tokens: each parameter by what it does to logits, and requests that do not disturb each other."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from conch.backends.engines.transformers.batch import BatchRow
from conch.backends.engines.transformers.sampling import adjust, choose, generator, logprobs
from conch.backends.generation.engine import EngineRequest
from conch.core.sampling.parameters import SamplingParams
from tests.unit.backends.engines.driving import finished_by_id, generate, tokens
from tests.unit.backends.engines.transformers_models import generated, opened, reference


def row(prompt: tuple[int, ...] = (0,), made: tuple[int, ...] = (), end_ids: Any = (), **sampling: Any) -> BatchRow:
    asked = SamplingParams(**sampling)
    seeded = generator(asked.seed, "cpu")
    return BatchRow(0, (0, 0), asked, [*prompt, *made], len(prompt), frozenset(end_ids), 100, generator=seeded)


def adjusted(values: list[float], one: BatchRow) -> list[float]:
    logits = torch.tensor([values])
    adjust(logits, [one])
    found: list[float] = logits[0].tolist()
    return found


def counted(values: list[float], draws: int = 4000, **sampling: Any) -> dict[int, float]:
    """How often each token is drawn."""
    torch.manual_seed(0)
    rows = [row(**sampling) for _ in range(draws)]
    drawn = Counter(choose(torch.tensor([values]).expand(draws, -1).clone(), rows))
    return {token: count / draws for token, count in sorted(drawn.items())}


def test_penalties_count_as_those_of_vllm() -> None:
    seen = row((0, 1), (2, 2, 0), repetition_penalty=2.0)
    assert adjusted([4.0, -4.0, 1.0, 1.0], seen) == [2.0, -8.0, 0.5, 1.0]
    assert adjusted([4.0, -4.0, 1.0, 1.0], row((0, 1), (2, 2, 0), presence_penalty=0.5)) == [3.5, -4.0, 0.5, 1.0]
    assert adjusted([4.0, -4.0, 1.0, 1.0], row((0, 1), (2, 2, 0), frequency_penalty=0.5)) == [3.5, -4.0, 0.0, 1.0]


def test_biases_bad_words_and_least_lengths() -> None:
    never = -math.inf
    assert adjusted([1.0, 2.0, 3.0], row(logit_bias={0: 5.0, 2: -1.0, 99: 1.0})) == [6.0, 2.0, 2.0]
    assert adjusted([1.0, 2.0, 3.0], row(made=(1,), bad_words_token_ids=((0,), (1, 2)))) == [never, 2.0, never]
    # The prompt does not begin a bad word.
    assert adjusted([1.0, 2.0, 3.0], row((1,), (), bad_words_token_ids=((1, 2),))) == [1.0, 2.0, 3.0]
    assert adjusted([1.0, 2.0, 3.0], row(made=(0,), end_ids=(2,), min_tokens=2)) == [1.0, 2.0, never]
    assert adjusted([1.0, 2.0, 3.0], row(made=(0, 0), end_ids=(2,), min_tokens=2)) == [1.0, 2.0, 3.0]


def test_draws_follow_the_probabilities() -> None:
    values = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    for settings in ({}, {"top_k": 4}, {"top_p": 0.9999}):
        shares = counted(values, **settings)
        assert all(abs(shares[token] - p) < 0.03 for token, p in enumerate((0.5, 0.25, 0.15, 0.1)))
    assert abs(counted(values, temperature=0.5)[0] - 0.25 / 0.345) < 0.03
    assert set(counted(values, top_k=2)) == {0, 1}
    assert set(counted(values, top_p=0.7)) == {0, 1}
    assert set(counted(values, top_p=0.76)) == {0, 1, 2}
    assert set(counted(values, top_p=0.01)) == {0}
    assert set(counted(values, min_p=0.25)) == {0, 1, 2}
    assert set(counted(values, top_k=3, top_p=0.8)) == {0, 1}
    assert set(counted(values, temperature=0)) == {0}


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


def test_log_probabilities_of_the_chosen_token_alone() -> None:
    [found, none] = logprobs(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), [0, 1], [0, None])
    assert none is None
    assert found is not None
    assert (found.rank, found.top) == (2, [])
