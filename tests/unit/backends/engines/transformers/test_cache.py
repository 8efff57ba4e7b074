"""The engine ``transformers``: a limited KV cache, priorities, prefixes, and padding within bounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from conch.backends.engines.transformers.engine import TransformersEngine
from conch.backends.generation.engine import EngineRequest
from conch.core.errors import ConchError
from conch.core.sampling.parameters import SamplingParams
from tests.unit.backends.engines.driving import finished, finished_by_id, generate, tokens
from tests.unit.backends.engines.transformers.models import VOCABULARY, generated, opened, reference, spec, write


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def test_sequences_go_back_to_waiting_when_the_cache_is_full_and_lose_nothing(folder: Path) -> None:
    model, asked = reference(folder), prompts(10, 12, 8, 14, 10, 6)
    engine = opened(folder, cache_tokens=64, prefix_caching=False)
    assert engine.cache_tokens == engine.context == 64
    for number, prompt in enumerate(asked):
        engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=24, temperature=0), priority=-number))
    got: dict[int, list[int]] = {number: [] for number in range(len(asked))}
    ended: list[int] = []
    while engine.busy:
        for progress in engine.step():
            got[progress.id] += progress.tokens
            if progress.finish:
                ended.append(progress.id)
        load = engine.usage()
        assert load.used_tokens <= 64
        assert load.running + load.waiting == len(asked) - len(ended)
    assert got == {n: generated(model, prompt, max_new_tokens=24)[0] for n, prompt in enumerate(asked)}
    assert engine.usage().preemptions > 0
    # The last one is the most important.
    assert ended.index(5) < ended.index(0)


def test_sampled_and_searched_sequences_survive_being_put_back(folder: Path) -> None:
    free, tight = opened(folder), opened(folder, cache_tokens=72)
    asked = [
        EngineRequest(number, prompt, SamplingParams(max_tokens=20, seed=number, beam_width=width, temperature=1.0))
        for number, (prompt, width) in enumerate(zip(prompts(9, 8, 7, 9), (1, 2, 1, 1), strict=True))
    ]
    assert {number: tokens(done) for number, done in finished_by_id(tight, *asked).items()} == {
        number: tokens(done) for number, done in finished_by_id(free, *asked).items()
    }
    assert tight.usage().preemptions > 0
    assert free.usage().preemptions == 0


def test_more_beams_than_sequences_of_a_batch_are_refused(folder: Path) -> None:
    engine = opened(folder, cache_tokens=64, max_sequences=4)
    with pytest.raises(ConchError, match=r"^beam_width 5 is more than the 4 sequences of a batch$"):
        engine.add(EngineRequest(0, [3] * 2, SamplingParams(max_tokens=2, beam_width=5)))
    assert not engine.busy


def test_a_context_beyond_the_positions_is_refused_and_a_shorter_one_ends_sequences(folder: Path) -> None:
    with pytest.raises(ConchError, match=r"^max_model_len 300 is more than the 256 positions of the model$"):
        opened(folder, context=300)
    engine = opened(folder, context=20)
    sampling = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    last = finished(engine, EngineRequest(0, [3] * 15, sampling))[-1]
    assert last.finish == "length"
    assert len(generate(engine, [3] * 15, max_tokens=50, temperature=0, ignore_eos=True)) == 5


def test_a_common_prefix_is_read_once(folder: Path) -> None:
    model, engine = reference(folder), opened(folder, max_batched_tokens=16)
    [common, *ends] = prompts(70, 1, 5, 33)
    asked = [common + end for end in ends]
    for number, prompt in enumerate(asked):
        assert generate(engine, prompt, max_tokens=10, temperature=0) == generated(model, prompt, max_new_tokens=10)[0]
        assert engine.usage().prefix_hits == 64 * number
    assert engine.usage().prefix_queries == sum(map(len, asked))
    # What was generated is known as well, for the next turn of a chat.
    answer = generated(model, asked[0], max_new_tokens=40, eos_token_id=None)[0]
    generate(engine, asked[0], max_tokens=40, temperature=0, ignore_eos=True)
    before = engine.usage().prefix_hits
    following = [*asked[0], *answer, 5, 6, 7]
    assert generate(engine, following, max_tokens=5, temperature=0) == generated(model, following, max_new_tokens=5)[0]
    assert engine.usage().prefix_hits - before == 96


def test_a_prefix_is_shared_only_with_requests_of_the_same_salt(folder: Path) -> None:
    engine = opened(folder)
    [prompt] = prompts(70)
    for hits, salt in ((0, "a"), (0, "b\ud800"), (0, ""), (64, "a"), (128, "")):
        generate(engine, prompt, max_tokens=1, temperature=0, cache_salt=salt)
        assert engine.usage().prefix_hits == hits


def test_prefixes_make_way_for_sequences(folder: Path) -> None:
    engine = opened(folder, cache_tokens=128)
    [first, second] = prompts(64, 100)
    generate(engine, first, max_tokens=2, temperature=0)
    generate(engine, second, max_tokens=20, temperature=0, ignore_eos=True)
    generate(engine, [*first, 3], max_tokens=2, temperature=0)
    # 120 tokens of 128 were in use: the older prefix is gone.
    assert engine.usage().prefix_hits == 0


def test_a_long_prompt_is_read_in_chunks_while_others_go_on(folder: Path) -> None:
    engine = TransformersEngine(spec(folder, max_batched_tokens=8), clock=lambda: 0.0)
    engine.add(EngineRequest(0, [3, 4], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)))
    for _ in range(2):  # the second one measures how long a step without a prompt takes
        engine.step()
    engine.add(EngineRequest(1, prompts(33)[0], SamplingParams(max_tokens=1, temperature=0)))
    steps = [[progress.id for progress in engine.step()] for _ in range(5)]
    assert steps == [[0], [0], [0], [0], [0, 1]]
    engine.add(EngineRequest(2, prompts(33)[0], SamplingParams(max_tokens=1, temperature=0)))
    engine.step()
    engine.cancel(2)
    engine.cancel(2)
    assert (engine.usage().running, engine.usage().waiting) == (1, 0)
    assert [progress.id for progress in engine.step()] == [0]
    engine.cancel(0)
    assert not engine.busy
    assert engine.step() == []


def test_lengths_far_apart_get_batches_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", max_position_embeddings=8192)
    model, engine = reference(folder), opened(folder, prefix_caching=False, max_batched_tokens=4096)
    asked = prompts(4200, 20, 30, 10)
    done = finished_by_id(
        engine,
        *(EngineRequest(n, prompt, SamplingParams(max_tokens=6, temperature=0)) for n, prompt in enumerate(asked)),
    )
    for number, prompt in enumerate(asked):
        assert tokens(done[number]) == generated(model, prompt, max_new_tokens=6)[0]
