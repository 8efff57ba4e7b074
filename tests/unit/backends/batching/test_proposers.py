"""Speculative decoding: proposals, and the tokens of a batcher with proposals."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from conch.backends.batching.batcher import CHECKED_TOKENS
from conch.backends.batching.proposers import DraftModel, Lookahead, PromptLookup
from conch.core.errors import ConchError
from conch.core.sampling.parameters import SamplingParams
from tests.fakes.decoder import FakeDecoder
from tests.unit.backends.batching.batches import ErringDecoder, batcher, completion, request, run

PROMPT = [3, 9, 4, 11, 5, 8, 20, 6]


def greedy(tokens: list[int], count: int, vocabulary: int = 31) -> list[int]:
    return completion(tokens, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), vocabulary)


# Prompt lookup.


@pytest.mark.parametrize(
    ("tokens", "count", "proposed"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the last occurrence
        ([7, 1, 2, 5, 6, 1, 2, 8, 7, 1, 2], 2, [5, 6]),  # a longer occurrence comes first
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([4, 4, 4], 2, [4, 4]),
        ([1, 2, 3], 4, []),
        ([5], 4, []),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_same_tokens(
    tokens: list[int], count: int, proposed: list[int]
) -> None:
    assert [list(found) for found in PromptLookup().propose([(1, tokens, count)])] == [proposed]


def test_prompt_lookup_finds_tokens_that_were_appended() -> None:
    lookup, tokens = PromptLookup(), [1, 2, 3]
    assert lookup.propose([(1, tokens, 2)]) == [()]
    tokens += [4, 1, 2]
    assert lookup.propose([(1, tokens, 2)]) == [[3, 4]]
    lookup.forget(1)
    assert lookup.propose([(1, [8, 1, 2], 2)]) == [()]


def test_prompt_lookup_finds_the_last_of_the_longest_occurrences() -> None:
    chance = random.Random(3)
    lookup = PromptLookup()
    tokens: list[int] = []
    for _ in range(300):
        tokens.append(chance.randrange(6))
        ends = [
            end
            for size in (4, 3, 2)
            for end in range(len(tokens) - 1, size - 1, -1)
            if tokens[end - size : end] == tokens[-size:]
        ]
        [proposed] = lookup.propose([(1, tokens, 1)])
        assert list(proposed) == [tokens[end] for end in ends[:1]]


def test_prompt_lookup_takes_little_memory_for_a_long_prompt() -> None:
    chance = random.Random(1)
    tokens = [chance.randrange(100_000) for _ in range(50_000)]
    lookup = PromptLookup()
    tracemalloc.start()
    lookup.propose([(1, tokens, 5)])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * len(tokens)


# Draft models.


def test_draft_model_proposes_its_greedy_tokens() -> None:
    draft = FakeDecoder()
    proposals = DraftModel(draft, 31).propose([(1, PROMPT, 3), (2, PROMPT[:4], 2)])
    assert proposals == [greedy(PROMPT, 3), greedy(PROMPT[:4], 2)]
    assert [len(chunks) for chunks in draft.runs] == [2, 2, 1]


def test_draft_model_reads_only_tokens_that_it_does_not_have() -> None:
    draft = FakeDecoder()
    model, tokens = DraftModel(draft, 31), list(PROMPT)
    [proposed] = model.propose([(1, tokens, 3)])
    tokens += [proposed[0], 7]  # the second proposal is refused
    assert model.propose([(1, tokens, 2)]) == [greedy(tokens, 2)]
    assert [(chunk.start, list(chunk.tokens)) for chunks in draft.runs[3:4] for chunk in chunks] == [(9, [7])]


def test_draft_model_reads_long_prompts_in_several_steps() -> None:
    draft = FakeDecoder(batched_tokens=10)
    model, tokens = DraftModel(draft, 31), [3 + index % 28 for index in range(25)]
    assert model.propose([(1, tokens, 2)]) == [[]]
    assert model.propose([(1, tokens, 2)]) == [[]]
    assert model.propose([(1, tokens, 2)]) == [greedy(tokens, 2)]


def test_draft_model_proposes_nothing_beyond_its_context_and_cache_and_vocabulary() -> None:
    assert DraftModel(FakeDecoder(context=9), 31).propose([(1, PROMPT, 5)]) == [greedy(PROMPT, 2)]
    assert DraftModel(FakeDecoder(blocks=1), 31).propose([(1, PROMPT, 5)]) == [[]]
    assert DraftModel(FakeDecoder(), greedy(PROMPT, 1)[0]).propose([(1, PROMPT, 5)]) == [[]]


def test_forgotten_sequences_leave_the_cache_of_the_draft_model() -> None:
    draft = FakeDecoder()
    model = DraftModel(draft, 31)
    model.propose([(1, PROMPT, 3), (2, PROMPT, 3)])
    model.forget(1)
    assert len(draft.lengths) == 1
    model.close()
    assert draft.lengths == {} and draft.closed


# The number of proposals.


def test_lookahead_follows_the_accepted_tokens() -> None:
    lookahead = Lookahead(5)
    lengths = []
    for accepted in (1, 2, 4, 2, 3, 5, 5):
        lengths.append(lookahead.next())
        lookahead.learn(lengths[-1], accepted)
    assert lengths == [1, 2, 4, 5, 3, 5, 5]
    assert Lookahead(0).next() == 0


def test_refused_proposals_are_followed_by_longer_and_longer_pauses() -> None:
    lookahead = Lookahead(5)
    steps = []
    for _ in range(60):
        steps.append(lookahead.next())
        if steps[-1]:
            lookahead.learn(steps[-1], 0)
    proposing = [step for step, length in enumerate(steps) if length]
    assert np.diff(proposing).tolist() == [2, 4, 8, 16, 16]


# The batcher.


def test_accepted_proposals_save_steps() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder, draft=FakeDecoder(), speculative="draft_model", draft_tokens=4)
    assert run(engine, request(1, PROMPT, max_tokens=21, ignore_eos=True)) == {1: [greedy(PROMPT, 21)]}
    # After the prompt, 1, 2, 4 and 4 tokens are proposed, and a step returns one more than that.
    assert len(decoder.runs) == 6


@pytest.mark.parametrize("errors", [3, 10])
def test_tokens_and_log_probabilities_of_a_seed_are_those_without_proposals(errors: int) -> None:
    requests = [
        request(id, PROMPT[id:], max_tokens=30, seed=id, temperature=0.6, logprobs=2, repetition_penalty=1.3)
        for id in range(4)
    ]
    plain, results = batcher(FakeDecoder()), []
    for engine in (plain, batcher(FakeDecoder(), draft=ErringDecoder(errors), speculative="draft_model")):
        found: dict[int, list[tuple[int, float]]] = {}
        for engine_request in requests:
            engine.add(engine_request)
        while engine.busy:
            for step in engine.step():
                assert step.logprobs is not None
                entries = [round(entry.logprob, 4) for entry in step.logprobs]
                found.setdefault(step.id, []).extend(zip(step.tokens, entries, strict=True))
        results.append(found)
    assert results[0] == results[1]


def test_repeated_texts_are_proposed_from_the_prompt() -> None:
    decoder = FakeDecoder(vocabulary=3)
    engine = batcher(decoder, speculative="ngram", draft_tokens=2)
    prompt = [1, 0, 1, 1, 0, 0, 1, 0]
    assert run(engine, request(1, prompt, max_tokens=60, ignore_eos=True)) == {1: [greedy(prompt, 60, 3)]}
    assert len(decoder.runs) < 60


def test_proposals_leave_room_for_prompts() -> None:
    decoder = FakeDecoder(batched_tokens=8)
    engine = batcher(decoder, draft=FakeDecoder(), speculative="draft_model", draft_tokens=7)
    engine.add(request(1, PROMPT, max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    engine.add(request(2, PROMPT[::-1], max_tokens=1))
    for _ in range(4):
        engine.step()
    assert engine.usage().running == 1


def test_logits_of_proposals_are_limited_in_a_step() -> None:
    decoder = FakeDecoder(batched_tokens=2048, blocks=1024)
    engine = batcher(decoder, draft=FakeDecoder(blocks=1024), speculative="draft_model", draft_tokens=32)
    run(engine, *(request(id, PROMPT[: 3 + id % 5], max_tokens=100, ignore_eos=True) for id in range(12)))
    rows = [sum(chunk.wanted for chunk in chunks) for chunks in decoder.runs]
    assert CHECKED_TOKENS < max(rows) <= CHECKED_TOKENS + 12


def test_beams_are_decoded_without_proposals() -> None:
    draft = FakeDecoder()
    run(batcher(FakeDecoder(), draft=draft, speculative="draft_model"), request(1, PROMPT, max_tokens=5, beam_width=2))
    assert draft.runs == []


@pytest.mark.parametrize(
    ("decoder", "draft", "settings", "message"),
    [
        (FakeDecoder(), None, {"batch_invariant": True}, "remove parameter 'batch_invariant'"),
        (FakeDecoder(rewinds=False), None, {}, "recurrent state"),
        (FakeDecoder(), FakeDecoder(rewinds=False), {}, "recurrent state"),
        (FakeDecoder(), None, {"draft_tokens": 33}, "'num_speculative_tokens' is 33; it must be at most 32"),
    ],
)
def test_speculative_decoding_is_refused(
    decoder: FakeDecoder, draft: FakeDecoder | None, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConchError, match=message):
        batcher(decoder, draft=draft, speculative="ngram", **settings)
