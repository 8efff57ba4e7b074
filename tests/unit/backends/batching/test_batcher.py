from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from conch.backends.batching.batcher import SCORED_CHUNK
from conch.backends.batching.decoder import Chunk
from conch.backends.batching.prefixes import common_length
from conch.backends.batching.sampler import logprobs
from conch.backends.batching.step_budget import FLOOR
from conch.backends.generation.engine import EngineRequest, EngineUsage, Progress, TokenLogprobs
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import STRUCTURED_OUTPUTS, Feature, SamplingParams
from conch.core.sampling.structures import Structure
from tests.fakes.decoder import FakeDecoder, logits_after
from tests.unit.backends.batching.batches import Batcher, batcher, expected, request, run

PROMPT = [3 + index % 28 for index in range(40)]


def _shapes(chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
    """Return (start, tokens, wanted) of the chunks of a run."""
    return [(chunk.start, len(chunk.tokens), chunk.wanted) for chunk in chunks]


def _read(decoder: FakeDecoder) -> int:
    """Return the number of tokens that the decoder has read."""
    return sum(len(chunk.tokens) for chunks in decoder.runs for chunk in chunks)


def _finish(engine: Batcher) -> list[Progress]:
    progress: list[Progress] = []
    while engine.busy:
        progress += engine.step()
    return progress


def test_prompt_is_read_in_the_run_in_which_others_decode() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    engine.add(request(1, PROMPT[:5], max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.add(request(2, PROMPT[7:20], max_tokens=20, ignore_eos=True))
    decoder.runs.clear()
    engine.step()
    [chunks] = decoder.runs
    assert _shapes(chunks) == [(7, 1, 1), (0, 13, 1)]


def test_long_prompt_is_read_in_chunks_and_only_the_last_has_logits() -> None:
    decoder = FakeDecoder(batched_tokens=100)
    engine = batcher(decoder, max_batched_tokens=16)
    assert run(engine, request(1, PROMPT, max_tokens=1))
    assert [_shapes(chunks) for chunks in decoder.runs] == [[(0, 16, 0)], [(16, 16, 0)], [(32, 8, 1)]]


def test_step_without_decoding_sequences_reads_several_prompts() -> None:
    decoder = FakeDecoder(batched_tokens=20)
    engine = batcher(decoder)
    for id in range(3):
        engine.add(request(id, PROMPT[id : id + 8]))
    engine.step()
    [chunks] = decoder.runs
    assert _shapes(chunks) == [(0, 8, 1), (0, 8, 1), (0, 4, 0)]


def test_lower_priorities_run_first_and_equal_ones_in_arrival_order() -> None:
    engine = batcher(FakeDecoder(), max_sequences=1)
    for id, priority in enumerate((1, 0, 1, 0)):
        engine.add(request(id, PROMPT[id : id + 5], priority=priority, max_tokens=2))
    assert list(dict.fromkeys(step.id for step in _finish(engine))) == [1, 3, 0, 2]


def test_prompt_of_higher_priority_is_read_before_the_rest_of_another() -> None:
    decoder = FakeDecoder(batched_tokens=8)
    engine = batcher(decoder)
    engine.add(request(1, PROMPT, priority=1))
    engine.step()
    engine.add(request(2, PROMPT[5:13]))
    assert [step.id for step in engine.step()] == [2]


def test_each_adapter_has_a_run_and_its_own_logits() -> None:
    decoder = FakeDecoder(adapters=("formal", "short"))
    engine = batcher(decoder)
    assert Feature.LORA in engine.features
    requests = [
        request(id, PROMPT[:9], lora_name=name, ignore_eos=True) for id, name in enumerate(("", "formal", "short", ""))
    ]
    assert run(engine, *requests) == {
        engine_request.id: expected(engine_request, decoder.vocabulary) for engine_request in requests
    }
    assert len(decoder.runs[0]) == 1


def test_usage_counts_requests_and_blocks() -> None:
    engine = batcher(FakeDecoder(), max_sequences=2)
    for id in range(3):
        engine.add(request(id, PROMPT[id : id + 6], max_tokens=2, ignore_eos=True))
    engine.step()
    usage = engine.usage()
    assert (usage.running, usage.waiting, usage.used_tokens) == (2, 1, 16)
    _finish(engine)
    usage = engine.usage()
    assert (usage.running, usage.waiting, usage.used_tokens) == (0, 0, 0)


def test_cancelled_requests_leave_at_once_and_report_nothing() -> None:
    engine = batcher(FakeDecoder(), max_sequences=1)
    engine.add(request(1, PROMPT, ignore_eos=True))
    engine.add(request(2, PROMPT, ignore_eos=True))
    engine.step()
    engine.cancel(1)
    engine.cancel(2)
    engine.cancel(3)
    assert not engine.busy
    assert engine.step() == []
    assert engine.usage().used_tokens == 0


def test_end_token_and_length_are_the_finish_reasons() -> None:
    engine = batcher(FakeDecoder())
    first = request(1, PROMPT[:3], max_tokens=3, ignore_eos=True)
    [tokens] = expected(first, 31)
    engine.add(first)
    engine.add(request(2, PROMPT[:3], max_tokens=3, stop_token_ids=(tokens[1],), ignore_eos=True))
    finished = {step.id: step.finish for step in _finish(engine) if step.finish}
    assert finished == {1: "length", 2: "stop"}


def test_close_frees_everything() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    run(engine, request(1, PROMPT))
    engine.add(request(2, PROMPT[3:]))
    engine.step()
    assert decoder.lengths
    engine.close()
    assert (decoder.lengths, decoder.closed) == ({}, True)


# The KV cache is full.


def test_preempted_sequences_continue_with_the_same_tokens() -> None:
    def results(blocks: int, seed: int | None) -> tuple[dict[int, list[list[int]]], int]:
        engine = batcher(FakeDecoder(blocks=blocks))
        sampling = {"temperature": 1.0, "seed": seed} if seed is not None else {}
        requests = [request(id, PROMPT[id : id + 8], max_tokens=24, ignore_eos=True, **sampling) for id in range(4)]
        return run(engine, *requests), engine.usage().preemptions

    for seed in (None, 7):
        ample, preemptions = results(64, seed)
        assert preemptions == 0
        tight, preemptions = results(12, seed)
        assert preemptions > 0
        assert tight == ample


def test_sequence_of_the_lowest_rank_is_preempted() -> None:
    engine = batcher(FakeDecoder(blocks=8))
    engine.add(request(1, PROMPT[:8], priority=1, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(request(2, PROMPT[4:12], max_tokens=16, ignore_eos=True))
    finished = [step.id for step in _finish(engine) if step.finish]
    assert engine.usage().preemptions == 1
    assert finished == [2, 1]


def test_sequence_that_does_not_fit_alone_fails() -> None:
    decoder = FakeDecoder(blocks=4)
    engine = batcher(decoder)
    engine.add(EngineRequest(1, PROMPT[:20], SamplingParams(temperature=0)))
    [step] = _finish(engine)
    assert step.error is not None
    assert step.error.code == Code.UNAVAILABLE
    assert step.error.message == "the KV cache is too small for the sequence"
    assert run(engine, request(2, PROMPT[:8], max_tokens=2, ignore_eos=True))


def test_beam_search_that_grows_beyond_the_cache_fails() -> None:
    engine = batcher(FakeDecoder(blocks=6))
    engine.add(request(1, PROMPT[:8], beam_width=4, max_tokens=20, ignore_eos=True))
    [step] = _finish(engine)
    assert step.error is not None
    assert step.error.code == Code.UNAVAILABLE


def test_long_prompt_is_not_overtaken_while_it_waits_for_room() -> None:
    engine = batcher(FakeDecoder(blocks=12))
    engine.add(request(1, PROMPT[:8], max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add(request(2, PROMPT[4:40], max_tokens=4, ignore_eos=True))
    for id in range(3, 6):
        engine.add(request(id, PROMPT[id : id + 4], max_tokens=4, ignore_eos=True))
    finished = [step.id for step in _finish(engine) if step.finish]
    assert finished[:2] == [1, 2]


# Prompts that begin alike.


@pytest.mark.parametrize(("prefix_caching", "hits"), [(True, 36), (False, 0)])
def test_known_prefix_is_not_read_again(prefix_caching: bool, hits: int) -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder, prefix_caching=prefix_caching)
    run(engine, request(1, PROMPT, max_tokens=1))
    second = request(2, PROMPT, max_tokens=3)
    before = _read(decoder)
    assert run(engine, second)[2] == expected(second, decoder.vocabulary)
    assert _read(decoder) - before == len(PROMPT) - hits + 2
    usage = engine.usage()
    assert (usage.prefix_queries, usage.prefix_hits) == ((80, hits) if prefix_caching else (0, 0))


def test_prefix_is_shared_only_with_requests_of_the_same_salt() -> None:
    engine = batcher(FakeDecoder())
    for hits, salt in ((0, ""), (0, "a"), (0, "b"), (36, "a"), (72, "")):
        run(engine, request(1, PROMPT, max_tokens=1, cache_salt=salt))
        assert engine.usage().prefix_hits == hits
    # Nor with one that is being read.
    for id, salt in enumerate(("c", "d", "c")):
        engine.add(request(id, PROMPT, max_tokens=1, cache_salt=salt))
    _finish(engine)
    assert engine.usage().prefix_hits == 72 + 36


def test_steps_report_the_cached_part_of_the_prompt() -> None:
    engine = batcher(FakeDecoder())
    run(engine, request(1, PROMPT, max_tokens=1))
    engine.add(request(2, PROMPT, max_tokens=2, ignore_eos=True))
    engine.add(request(3, [9, 9, 9], max_tokens=1))
    cached = {(step.id, step.cached_tokens) for step in _finish(engine)}
    assert cached == {(2, 36), (3, 0)}


def test_prefix_of_a_running_sequence_is_shared() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    engine.add(request(1, PROMPT, max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(request(2, [*PROMPT[:20], 3, 3], max_tokens=30, ignore_eos=True))
    for _ in range(2):
        engine.step()
    assert engine.usage().prefix_hits == 20
    assert engine.usage().used_tokens == 44 + 4


def test_same_prompts_that_arrive_together_are_read_once() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    requests = [request(id, PROMPT, max_tokens=2, ignore_eos=True) for id in range(8)]
    assert run(engine, *requests) == {
        engine_request.id: expected(engine_request, decoder.vocabulary) for engine_request in requests
    }
    assert engine.usage().prefix_hits == 7 * 36
    assert _read(decoder) == 40 + 7 * 4 + 8


def test_prompt_does_not_wait_for_a_sequence_of_lower_priority() -> None:
    decoder = FakeDecoder(batched_tokens=16)
    engine = batcher(decoder)
    engine.add(request(1, PROMPT, priority=1))
    engine.step()
    engine.add(request(2, PROMPT))
    decoder.runs.clear()
    engine.step()
    assert [chunk.slot for chunk in decoder.runs[0]] == [1]
    assert _shapes(decoder.runs[0]) == [(16, 16, 0)]


def test_conversation_continues_in_the_slot_of_its_last_turn() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    conversation = PROMPT[:10]
    for id in range(3):
        engine_request = request(id, conversation, max_tokens=7, ignore_eos=True)
        [tokens] = run(engine, engine_request)[id]
        assert [tokens] == expected(engine_request, decoder.vocabulary)
        conversation = [*conversation, *tokens, 3, 4, 5]
    assert len(decoder.lengths) == 1


def test_least_recently_used_prefix_is_freed_first() -> None:
    decoder = FakeDecoder(blocks=12)
    engine = batcher(decoder)
    prompts = [[token, *PROMPT[:16]] for token in (3, 4)]
    for id, prompt in enumerate(prompts):
        run(engine, request(id, prompt, max_tokens=1))
    run(engine, request(2, prompts[0], max_tokens=1))  # uses the first prompt again
    hits = engine.usage().prefix_hits
    run(engine, request(3, [5, *PROMPT[:19]], max_tokens=1))
    run(engine, request(4, prompts[0], max_tokens=1))
    assert engine.usage().prefix_hits - hits == 16


def test_decoder_limits_the_tokens_of_ended_sequences() -> None:
    decoder = FakeDecoder(blocks=64)
    decoder.retained_tokens = 5 * decoder.block_tokens
    engine = batcher(decoder)
    for id in range(4):
        run(engine, request(id, [id + 3, *PROMPT[:15]], max_tokens=1))
        assert sum(decoder.lengths.values()) <= decoder.retained_tokens
    before = engine.usage().prefix_hits
    run(engine, request(4, [6, *PROMPT[:16]], max_tokens=1))  # the latest is still there
    assert engine.usage().prefix_hits - before == 16
    run(engine, request(5, [3, *PROMPT[:16]], max_tokens=1))  # the first is not
    assert engine.usage().prefix_hits - before == 16


def test_tokens_beyond_the_limit_are_saved_and_restored() -> None:
    decoder = FakeDecoder(blocks=24)
    decoder.retained_tokens, decoder.saved_bytes = 2 * decoder.block_tokens, 100
    engine = batcher(decoder)
    conversations = [[token, *PROMPT[:15]] for token in (3, 4, 5)]
    for turn, hits in enumerate((0, 3 * 20)):
        before = engine.usage().prefix_hits
        for id, conversation in enumerate(conversations):
            engine_request = request(id, conversation, max_tokens=5, ignore_eos=True)
            [tokens] = run(engine, engine_request)[id]
            assert [tokens] == expected(engine_request, decoder.vocabulary)
            conversations[id] = [*conversation, *tokens, 6]
        assert decoder.lengths == {}
        assert engine.usage().prefix_hits - before == hits, turn
    # A part of what was saved, for two at the same time.
    requests = [request(id, [*conversations[2][:13], 7], max_tokens=3) for id in range(2)]
    assert run(engine, *requests) == {each.id: expected(each, decoder.vocabulary) for each in requests}
    assert engine.usage().prefix_hits == 3 * 20 + 2 * 12
    engine.forget()
    run(engine, request(0, conversations[2], max_tokens=1))
    assert engine.usage().prefix_hits == 0


def test_the_beginning_of_saved_tokens_needs_no_more_room_than_it_has() -> None:
    decoder = FakeDecoder(blocks=12)
    decoder.retained_tokens, decoder.saved_bytes = 0, 100
    engine = batcher(decoder)
    run(engine, request(0, [3, *PROMPT[:31]], max_tokens=1))
    engine.add(request(1, [4, *PROMPT[:23]], max_tokens=4, ignore_eos=True))
    engine.step()
    engine_request = request(2, [3, *PROMPT[:7], 5], max_tokens=4, ignore_eos=True)
    assert run(engine, engine_request)[2] == expected(engine_request, decoder.vocabulary)
    assert engine.usage().prefix_hits == 8


def test_a_slot_that_lacks_what_a_sequence_needs_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeDecoder()
    monkeypatch.setattr(decoder, "holds", lambda slot, tokens: tokens > 12)
    engine = batcher(decoder)
    for id, (length, hits) in enumerate(((20, 0), (12, 0), (18, 16))):
        before = engine.usage().prefix_hits
        engine_request = request(id, [*PROMPT[:length], 9], max_tokens=2)
        assert run(engine, engine_request)[id] == expected(engine_request, decoder.vocabulary)
        assert engine.usage().prefix_hits - before == hits


def test_saved_tokens_are_bounded_and_the_least_recently_used_is_forgotten_first() -> None:
    decoder = FakeDecoder()
    decoder.retained_tokens, decoder.saved_bytes = 0, 2 * 16
    engine = batcher(decoder)
    prompts = [[token, *PROMPT[:16]] for token in (3, 4, 5)]
    hits = [0]
    for id in (0, 1, 0, 2, 0, 1):
        run(engine, request(id, prompts[id], max_tokens=1))
        hits.append(engine.usage().prefix_hits)
    assert [after - before for before, after in pairwise(hits)] == [0, 0, 16, 0, 16, 0]


def test_prefixes_are_not_kept_by_a_decoder_that_cannot_rewind() -> None:
    decoder = FakeDecoder(rewinds=False)
    engine = batcher(decoder)
    assert Feature.BEAMS not in engine.features
    for id in range(2):
        engine_request = request(id, PROMPT, max_tokens=4)
        assert run(engine, engine_request)[id] == expected(engine_request, decoder.vocabulary)
    assert decoder.lengths == {}
    assert engine.usage().prefix_queries == 0


def test_waiting_prompt_is_compared_once_with_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(*arguments: Any) -> int:
        nonlocal compared
        compared += 1
        return common_length(*arguments)

    monkeypatch.setattr("conch.backends.batching.batcher.common_length", counted)
    decoder = FakeDecoder(batched_tokens=512, context=1024, blocks=1000)
    engine = batcher(decoder, batch_invariant=True)
    requests = [request(id, [3 + index % 28 for index in range(600)], max_tokens=1) for id in range(6)]
    for engine_request in requests:
        engine.add(engine_request)
    for _ in range(4):
        engine.step()
        assert engine.usage().running == 1
    assert compared == 5
    assert run(engine) == {
        engine_request.id: expected(engine_request, decoder.vocabulary) for engine_request in requests
    }
    assert engine.usage().prefix_hits == 5 * 512


def test_waiting_prompt_continues_when_the_one_that_is_read_is_cancelled() -> None:
    decoder = FakeDecoder(batched_tokens=50)
    engine = batcher(decoder, max_batched_tokens=8)
    requests = [request(id, PROMPT, max_tokens=2, ignore_eos=True) for id in range(2)]
    for engine_request in requests:
        engine.add(engine_request)
    engine.step()
    engine.cancel(0)
    decoder.runs.clear()
    tokens = [token for step in _finish(engine) for token in step.tokens]
    assert [tokens] == expected(requests[1], decoder.vocabulary)
    assert decoder.runs[0][0].start == 8


def test_preempted_sequence_shares_only_its_prompt_if_results_must_not_depend_on_the_batch() -> None:
    decoder = FakeDecoder(blocks=10)
    engine = batcher(decoder, batch_invariant=True, max_batched_tokens=4)
    first = request(1, PROMPT[:8], max_tokens=20, ignore_eos=True, priority=1)
    [tokens] = expected(first, decoder.vocabulary)
    engine.add(first)
    for _ in range(14):
        engine.step()
    # A prompt that begins with the tokens that the first request generated: it is read in chunks of four.
    engine.add(request(2, [*PROMPT[:8], *tokens[:12], 3, 4, 5], max_tokens=10, ignore_eos=True))
    while not any(step.finish for step in engine.step() if step.id == 2):
        pass
    assert engine.usage().preemptions == 1
    decoder.runs.clear()
    assert _finish(engine)[-1].tokens == tokens[-1:]
    starts = [(chunk.start, len(chunk.tokens)) for chunks in decoder.runs for chunk in chunks]
    assert starts == [(4, 4), *((position, 1) for position in range(8, 27))]


# Log-probabilities of the prompt.


def _scored(prompt: list[int], vocabulary: int, count: int) -> list[TokenLogprobs]:
    return [
        logprobs(logits_after(prompt[:position], vocabulary), prompt[position], count)
        for position in range(1, len(prompt))
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"batch_invariant": True}, {"max_batched_tokens": 7}], ids=["", "invariant", "in parts"]
)
def test_log_probabilities_of_a_prompt_come_with_the_first_token(settings: dict[str, Any]) -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder, **settings)
    run(engine, request(0, PROMPT, max_tokens=1))  # its prefix has no logits
    others = [request(id, [id, *PROMPT], max_tokens=5, ignore_eos=True) for id in (3, 4)]
    scored = [request(id, PROMPT[:length], max_tokens=3, ignore_eos=True, prompt_logprobs=2) for id, length in
              ((10, 40), (11, 17), (12, 1))]  # fmt: skip
    for engine_request in (*others, *scored):
        engine.add(engine_request)
    progress = _finish(engine)
    for engine_request in scored:
        steps = [step for step in progress if step.id == engine_request.id]
        assert [[token for step in steps for token in step.tokens]] == expected(engine_request, decoder.vocabulary)
        assert steps[0].prompt_logprobs == _scored(engine_request.prompt, decoder.vocabulary, 2)
        assert all(step.prompt_logprobs is None for step in steps[1:])
    assert all(step.prompt_logprobs is None for step in progress if step.id in (3, 4))


@pytest.mark.parametrize("length", [SCORED_CHUNK, SCORED_CHUNK + 1, SCORED_CHUNK + 2])
def test_log_probabilities_of_a_prompt_come_with_the_first_of_several_tokens(length: int) -> None:
    decoder = FakeDecoder(batched_tokens=512)
    engine = batcher(decoder, draft=FakeDecoder(batched_tokens=512), speculative="draft_model")
    prompt = [3 + index % 28 for index in range(length)]
    engine.add(request(1, prompt, max_tokens=9, ignore_eos=True, prompt_logprobs=0))
    progress = _finish(engine)
    assert [step.prompt_logprobs for step in progress if step.prompt_logprobs] == [
        _scored(prompt, decoder.vocabulary, 0)
    ]
    assert progress[0].prompt_logprobs
    assert max(len(step.tokens) for step in progress) > 1


def test_logits_of_prompts_are_limited_in_a_step() -> None:
    decoder = FakeDecoder(batched_tokens=512)
    engine = batcher(decoder)
    prompt = [3 + index % 28 for index in range(300)]
    for id in range(2):
        engine.add(request(id, prompt, max_tokens=1, prompt_logprobs=0))
    progress = _finish(engine)
    assert [step.prompt_logprobs for step in progress] == [_scored(prompt, decoder.vocabulary, 0)] * 2
    assert max(sum(chunk.wanted for chunk in chunks) for chunks in decoder.runs) == SCORED_CHUNK


@pytest.mark.parametrize(("settings", "most"), [({}, FLOOR), ({"batch_invariant": True}, SCORED_CHUNK)])
def test_scored_chunks_are_short_while_others_decode(settings: dict[str, Any], most: int) -> None:
    # Tokens of prompts without scores cost little, so that the budget allows many of them.
    decoder = FakeDecoder(batched_tokens=512, seconds=lambda chunks: 0.01)
    engine = batcher(decoder, **settings)
    prompt = [3 + index % 28 for index in range(200)]
    engine.add(request(1, [4, *prompt], max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add(request(2, prompt, max_tokens=1, prompt_logprobs=0))
    decoder.runs.clear()
    progress = _finish(engine)
    assert max(len(chunk.tokens) for chunks in decoder.runs for chunk in chunks) == most
    [scores] = [step.prompt_logprobs for step in progress if step.prompt_logprobs is not None]
    assert scores == _scored(prompt, decoder.vocabulary, 0)


def test_preempted_prompt_is_scored_again() -> None:
    decoder = FakeDecoder(blocks=13, batched_tokens=8)
    engine = batcher(decoder)
    engine.add(request(1, PROMPT[:5], max_tokens=20, ignore_eos=True))
    engine.add(request(2, PROMPT, max_tokens=2, ignore_eos=True, priority=1, prompt_logprobs=0))
    progress = _finish(engine)
    assert engine.usage().preemptions > 0
    starts = [chunk.start for chunks in decoder.runs for chunk in chunks if chunk.wanted > 1]
    assert starts.count(0) == 2
    [scores] = [step.prompt_logprobs for step in progress if step.prompt_logprobs is not None]
    assert scores == _scored(PROMPT, decoder.vocabulary, 0)


def test_beam_search_has_no_log_probabilities_of_the_prompt() -> None:
    with pytest.raises(ConchError, match="beam search with prompt_logprobs is not supported by engine 'fake'"):
        batcher(FakeDecoder()).add(request(1, PROMPT, beam_width=2, prompt_logprobs=1))


# Beam search.


def test_prompt_of_beams_is_read_once() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder)
    engine_request = request(1, PROMPT, beam_width=4, n=4, max_tokens=6, ignore_eos=True)
    assert run(engine, engine_request)[1] == expected(engine_request, decoder.vocabulary)
    assert _shapes(decoder.runs[0]) == [(0, 40, 1)]
    assert _shapes(decoder.runs[1]) == [(40, 1, 1)] * 4


def test_beams_count_as_sequences_of_the_batch() -> None:
    decoder = FakeDecoder()
    engine = batcher(decoder, max_sequences=4)
    engine.add(request(1, PROMPT[:5], beam_width=3, max_tokens=4, ignore_eos=True))
    engine.add(request(2, PROMPT[2:7], beam_width=2, max_tokens=4, ignore_eos=True))
    while engine.busy:
        engine.step()
        assert len(decoder.runs[-1]) <= 4
        assert engine.usage().running <= 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"beam_width": 5}, "beam_width 5 is more than the 4 sequences of a batch"),
        (
            {"beam_width": 2, "structured_outputs": Structure("regex", "a*")},
            "beam search with structured output is not supported by engine 'fake'",
        ),
    ],
)
def test_beam_search_is_refused(sampling: dict[str, Any], message: str) -> None:
    engine = batcher(FakeDecoder(), max_sequences=4)
    with pytest.raises(ConchError, match=message):
        engine.add(request(1, PROMPT, **sampling))
    assert not engine.busy


def test_engine_without_a_tokenizer_has_no_structured_output() -> None:
    assert not batcher(FakeDecoder()).features & STRUCTURED_OUTPUTS


# Batch invariance.


def test_invariant_chunks_have_runs_of_their_own_and_fixed_boundaries() -> None:
    def chunks_of_prompt(others: int) -> list[tuple[int, int, int]]:
        decoder = FakeDecoder(batched_tokens=1000)
        engine = batcher(decoder, batch_invariant=True)
        for id in range(others):
            engine.add(request(id, PROMPT[id : id + 30], max_tokens=9, ignore_eos=True))
            engine.step()
        run(engine, request(99, [4] * 300, max_tokens=4, ignore_eos=True))
        assert all(len(chunks) == 1 for chunks in decoder.runs)
        return _shapes([chunk for [chunk] in decoder.runs if set(chunk.tokens) == {4} and len(chunk.tokens) > 1])

    assert chunks_of_prompt(others=0) == [(0, 128, 0), (128, 128, 0), (256, 44, 1)]
    assert chunks_of_prompt(others=3) == [(0, 128, 0), (128, 128, 0), (256, 44, 1)]


def test_invariant_prefixes_end_where_chunks_of_the_prompt_end() -> None:
    decoder = FakeDecoder(batched_tokens=1000)
    engine = batcher(decoder, batch_invariant=True)
    first = request(1, [4] * 300, max_tokens=100, ignore_eos=True)
    [tokens] = run(engine, first)[1]
    run(engine, request(2, [*first.prompt, *tokens], max_tokens=1))
    assert engine.usage().prefix_hits == 256


def test_invariant_sequences_read_their_own_tokens_one_at_a_time_after_preemption() -> None:
    decoder = FakeDecoder(blocks=12)
    engine = batcher(decoder, batch_invariant=True)
    requests = [request(id, PROMPT[id : id + 8], max_tokens=24, ignore_eos=True) for id in range(3)]
    assert run(engine, *requests) == {
        engine_request.id: expected(engine_request, decoder.vocabulary) for engine_request in requests
    }
    assert engine.usage().preemptions > 0
    assert {len(chunk.tokens) for [chunk] in decoder.runs} == {1, 8}


# The size of steps.


@pytest.mark.parametrize("token_seconds", [0.0002, 0.001, 0.005])
def test_long_prompts_delay_the_tokens_of_others_by_at_most_three_times_the_median(token_seconds: float) -> None:
    """A machine whose steps take 10 ms, 2 ms per decoding sequence and this time per prompt token."""

    def seconds(chunks: Sequence[Chunk]) -> float:
        decoding = sum(len(chunk.tokens) == 1 for chunk in chunks)
        return 0.01 + 0.002 * decoding + token_seconds * sum(len(chunk.tokens) for chunk in chunks)

    decoder = FakeDecoder(blocks=400, block_tokens=32, context=4096, batched_tokens=1024, seconds=seconds)
    engine = batcher(decoder)
    for id in range(4):
        engine.add(request(id, PROMPT[id : id + 20], max_tokens=1500, ignore_eos=True))
    _step_for(engine, decoder, 2.0)
    gaps: list[float] = []
    for number in range(10):
        engine.add(request(100 + number, [3 + (number + index) % 28 for index in range(1000)], max_tokens=1))
        gaps += _step_for(engine, decoder, 1.0)
    gaps.sort()
    assert gaps[int(0.99 * len(gaps))] <= 3 * median(gaps)


def _step_for(engine: Batcher, decoder: FakeDecoder, seconds: float) -> list[float]:
    """Step for a time of the decoder's clock; returns the times between the tokens of request 0."""
    end, gaps, last = decoder.now + seconds, [], decoder.now
    while decoder.now < end and engine.busy:
        if any(step.id == 0 and step.tokens for step in engine.step()):
            gaps.append(decoder.now - last)
            last = decoder.now
    return gaps


def test_forgotten_requests_leave_neither_prefixes_nor_totals() -> None:
    engine = batcher(FakeDecoder())
    prompt = list(range(3, 23))
    run(engine, request(1, prompt, max_tokens=2))
    run(engine, request(2, prompt, max_tokens=2))
    assert engine.usage().prefix_hits > 0
    engine.forget()
    assert engine.usage() == EngineUsage()
    run(engine, request(3, prompt, max_tokens=2))
    assert (engine.usage().prefix_queries, engine.usage().prefix_hits) == (len(prompt), 0)
