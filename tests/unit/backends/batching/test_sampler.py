"""Choosing tokens: the effect of each parameter on logits, and rows that do not affect each other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from conch.backends.batching.sampler import Beam, BeamSearch, SequenceState, adjust, choose, logprobs, sample
from conch.core.sampling.parameters import SamplingParams

NEVER = -math.inf


def sequence(
    prompt: tuple[int, ...] = (0,), made: tuple[int, ...] = (), end_ids: Any = (), **sampling: Any
) -> SequenceState:
    params = SamplingParams(**sampling)
    tokens = [*prompt, *made]
    return SequenceState(
        0, (0, 0), params, tokens, len(prompt), frozenset(end_ids), 100, np.random.default_rng(params.seed)
    )


def logits(*rows: list[float]) -> Any:
    return np.array(rows, np.float32)


def adjusted(values: list[float], row: SequenceState) -> list[float]:
    [scores] = logits(values)
    adjust(scores, row.sampling, row.tokens, row.prompt_length, row.end_ids)
    result: list[float] = scores.tolist()
    return result


def shares(values: Any, draws: int = 4000, **sampling: Any) -> dict[int, float]:
    """How often each token is drawn."""
    scores = np.array(values, np.float32)[None]
    row = sequence(seed=1, **sampling)
    drawn = Counter(choose(scores, [row])[0] for _ in range(draws))
    return {token: count / draws for token, count in sorted(drawn.items())}


def test_penalties_count_as_those_of_vllm() -> None:
    seen = sequence((0, 1), (2, 2, 0), repetition_penalty=2.0)
    assert adjusted([4.0, -4.0, 1.0, 1.0], seen) == [2.0, -8.0, 0.5, 1.0]
    assert adjusted([4.0, -4.0, 1.0, 1.0], sequence((0, 1), (2, 2, 0), presence_penalty=0.5)) == [3.5, -4.0, 0.5, 1.0]
    assert adjusted([4.0, -4.0, 1.0, 1.0], sequence((0, 1), (2, 2, 0), frequency_penalty=0.5)) == [3.5, -4.0, 0.0, 1.0]


def test_biases_bad_words_and_minimum_lengths() -> None:
    assert adjusted([1.0, 2.0, 3.0], sequence(logit_bias={0: 5.0, 2: -1.0, 99: 1.0})) == [6.0, 2.0, 2.0]
    assert adjusted([1.0, 2.0, 3.0], sequence(made=(1,), bad_words_token_ids=((0,), (1, 2)))) == [NEVER, 2.0, NEVER]
    # The prompt does not begin a bad word.
    assert adjusted([1.0, 2.0, 3.0], sequence((1,), (), bad_words_token_ids=((1, 2),))) == [1.0, 2.0, 3.0]
    assert adjusted([1.0, 2.0, 3.0], sequence(made=(0,), end_ids=(2,), min_tokens=2)) == [1.0, 2.0, NEVER]
    assert adjusted([1.0, 2.0, 3.0], sequence(made=(0, 0), end_ids=(2,), min_tokens=2)) == [1.0, 2.0, 3.0]
    # A structure that is complete before the minimum length allows only the end.
    assert adjusted([NEVER, NEVER, 3.0], sequence(end_ids=(2,), min_tokens=2)) == [NEVER, NEVER, 3.0]


def test_draws_follow_the_probabilities() -> None:
    values = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    for settings in ({}, {"top_k": 4}, {"top_p": 0.9999}):
        drawn = shares(values, **settings)
        assert all(abs(drawn[token] - p) < 0.03 for token, p in enumerate((0.5, 0.25, 0.15, 0.1)))
    assert abs(shares(values, temperature=0.5)[0] - 0.25 / 0.345) < 0.03
    assert set(shares(values, top_k=2)) == {0, 1}
    assert set(shares(values, top_p=0.7)) == {0, 1}
    assert set(shares(values, top_p=0.76)) == {0, 1, 2}
    assert set(shares(values, top_p=0.01)) == {0}
    assert set(shares(values, min_p=0.25)) == {0, 1, 2}
    assert set(shares(values, top_k=3, top_p=0.8)) == {0, 1}
    assert set(shares(values, temperature=0)) == {0}


#: Sizes around those of the groups in which a vocabulary is searched.
@pytest.mark.parametrize("size", [1, 63, 64, 255, 511, 512, 513, 1024, 5000])
def test_large_vocabularies_are_sampled_like_small_ones(size: int) -> None:
    values = np.full(size, -1e9)
    likely = sorted({0, size // 3, size // 2, size - 1})
    values[likely] = np.log(np.arange(1, len(likely) + 1))
    total = sum(range(1, len(likely) + 1))
    for settings in ({}, {"top_p": 0.999}, {"top_k": 4}, {"top_k": 300}):
        drawn = shares(values, 3000, **settings)
        assert set(drawn) == set(likely)
        assert all(abs(drawn[token] - weight / total) < 0.04 for weight, token in enumerate(likely, 1))


def candidates(values: Any, sampling: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by sorting the vocabulary."""
    order = np.argsort(-values, kind="stable")
    scaled = values[order].astype(np.float64) / sampling.temperature
    scaled[scaled < scaled[0] + np.log(max(sampling.min_p, 1e-300))] = NEVER
    if sampling.top_k:
        scaled[sampling.top_k :] = NEVER
    weights = np.exp(scaled - scaled[0])
    before = np.cumsum(weights) - weights
    return set(order[(weights > 0) & (before < sampling.top_p * weights.sum())].tolist())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("settings", [
    {"top_k": 5}, {"top_k": 40, "top_p": 0.7}, {"top_k": 900}, {"top_p": 0.05}, {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 0.3}, {"min_p": 0.2, "top_p": 0.5}, {"min_p": 0.3, "top_k": 7},
])  # fmt: skip
def test_only_the_candidates_are_drawn(settings: dict[str, Any], spread: float) -> None:
    # Rounded, so that some logits are equal, as in networks of low precision.
    values = (np.random.default_rng(3).standard_normal(2000) * spread).round(2).astype(np.float32)
    allowed = candidates(values, SamplingParams(**settings))
    drawn = set(shares(values, max(300, 4 * len(allowed)), **settings))
    assert drawn <= allowed
    assert len(drawn) >= len(allowed) / 3 or spread > 0


def test_banned_tokens_are_never_drawn() -> None:
    values = np.full(3000, NEVER)
    values[[7, 2990]] = (3.0, 2.5)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 100.0}):
        assert set(shares(values, 300, **settings)) == {7, 2990}


def test_a_low_temperature_chooses_the_best_token_without_warnings() -> None:
    values = [1.0, np.finfo(np.float32).min, 1.001]
    assert set(shares(values, 20, temperature=1e-6)) == {2}


@pytest.mark.parametrize("seed", [0, 5, 2**63, 2**64 - 1])
@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_a_seed_gives_the_same_tokens_in_every_batch(settings: dict[str, Any], seed: int) -> None:
    random = np.random.default_rng(0)

    def tokens(*others: SequenceState) -> list[int]:
        steps = np.random.default_rng(1)
        row = sequence(seed=seed, **settings)
        for _ in range(12):
            scores = steps.standard_normal((1, 1000)).astype(np.float32)
            more = random.standard_normal((len(others), 1000)).astype(np.float32)
            sample([*others, row], np.concatenate([more, scores]))
        return row.tokens[1:]

    alone = tokens()
    others = [sequence(top_k=number, top_p=0.5 + number / 20) for number in range(8)]
    assert alone == tokens() == tokens(*others)
    assert len(set(alone)) > 1


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    values = np.random.default_rng(2).standard_normal(700).astype(np.float32)
    rows = [sequence(temperature=0, logprobs=3, logit_bias={9: 50.0}), sequence(temperature=0)]
    [progress, other] = sample(rows, np.stack([values, values]))
    expected = values - np.log(np.exp(values.astype(np.float64)).sum())
    best = np.argsort(-values)[:3].tolist()
    assert progress.tokens == [9] and other.logprobs is None
    assert progress.logprobs is not None
    [entry] = progress.logprobs
    assert entry.logprob == pytest.approx(expected[9], abs=1e-5)
    assert entry.rank == int((values > values[9]).sum()) + 1
    assert [token for token, _ in entry.top] == best
    assert [logprob for _, logprob in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_log_probabilities_of_the_chosen_token_alone() -> None:
    entry = logprobs(logits([0.0, 1.0])[0], 0, 0)
    assert (entry.rank, entry.top) == (2, [])


def test_only_beams_that_continue_or_end_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def beam(*arguments: Any, **settings: Any) -> Beam:
        built.append(arguments)
        return Beam(*arguments, **settings)

    search = BeamSearch([5], SamplingParams(beam_width=4, n=4), frozenset(range(5)), 9)
    monkeypatch.setattr("conch.backends.batching.sampler.Beam", beam)
    scores = np.arange(40, dtype=np.float32)[None].repeat(4, axis=0)
    search.advance(scores)
    assert len(built) == 4  # of 24 candidates
    scores[:, 0] = 50.0
    search.advance(scores)
    assert len(built) == 4 + 4 + 4  # four beams ended and four continued
    assert [beam.tokens[-1] for beam in search.results()] == [0] * 4


def test_a_beam_search_keeps_the_most_likely_sequences() -> None:
    # After token 0 all tokens are equally likely; token 1 is followed by a certain one.
    search = BeamSearch([5], SamplingParams(beam_width=2, n=2), frozenset(), 2)
    first = logits([math.log(0.6), math.log(0.4), NEVER], [0.0, 0.0, 0.0])
    assert search.advance(first) == [0, 0]
    assert [beam.tokens for beam in search.running] == [[0], [1]]
    assert search.advance(logits([0.0, 0.0, 0.0], [0.0, NEVER, NEVER])) == []
    assert search.done
    assert [beam.tokens for beam in search.results()] == [[1, 0], [0, 0]]
    assert [round(math.exp(beam.total), 3) for beam in search.results()] == [0.4, 0.2]
