"""The tokens of the engine ``llamacpp`` are those of llama.cpp without conch, alone and in a busy batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

import numpy as np
import torch

from conch.backends.generation.agreement import verify_gguf
from conch.backends.generation.engine import EngineRequest, GenerationEngine, Progress
from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure
from tests.llamacpp.models import Alone, demo, opened, recoded, request, write, write_mamba
from tests.unit.backends.engines.driving import finished_by_id, tokens
from tests.unit.checkpoints.gguf_models import MODELS

pytestmark = pytest.mark.timeout(600)

TEXTS = (
    "The capital of France is",
    "Where is the nearest library? The nearest one is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village near the sea, there lived",
    "The three primary colours are",
    "Water boils at",
)
LONG = "The train to the coast leaves at nine, and the bus follows it. " * 12
COUNT = 24
#: llama.cpp's kernels for several rows round differently from those for one: the largest difference of logits that may
#: change the order of two tokens. Without conch, the distance of two of the five best tokens after ``LONG`` changes by
#: 0.39 in Q8_0 when the last token of the prompt is read in a batch of its own.
TIE = 0.4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = open_gguf(read_gguf(demo()))
    return [list(tokenizer.encode(text)) for text in (*TEXTS, LONG)]


def greedy(engine: GenerationEngine, prompts: list[list[int]], count: int = COUNT) -> dict[int, list[int]]:
    """Return the tokens of requests that run side by side; each one starts a step later than the one before."""
    coming = [request(id, prompt, max_tokens=count) for id, prompt in enumerate(prompts)]
    completions: dict[int, list[int]] = {id: [] for id in range(len(prompts))}
    while coming or engine.busy:
        if coming:
            engine.add(coming.pop(0))
        for progress in engine.step():
            assert progress.error is None, progress.error
            completions[progress.id] += progress.tokens
    return completions


def logprobs(steps: list[Progress]) -> list[float]:
    return [entry.logprob for step in steps for entry in step.logprobs or ()]


@pytest.fixture(scope="module", params=["Q4_1", "Q8_0", "F16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    return demo() if kind == "Q4_1" else recoded(tmp_path_factory.mktemp(kind) / "model.gguf", kind)


@pytest.fixture(scope="module")
def expected(path: Path, prompts: list[list[int]]) -> list[list[Any]]:
    """The logits after each prompt and each of its greedy tokens, from llama.cpp without conch."""
    alone = Alone(path)
    return [alone.logits(prompt, COUNT) for prompt in prompts]


def best(logits: list[Any]) -> list[int]:
    return [int(row.argmax()) for row in logits]


def test_greedy_tokens_alone_are_those_of_llama_cpp(
    path: Path, prompts: list[list[int]], expected: list[list[Any]]
) -> None:
    with opened(path) as engine:
        for prompt, logits in zip(prompts, expected, strict=True):
            assert greedy(engine, [prompt])[0] == best(logits)


def assert_same_but_for_ties(completion: list[int], expected: list[Any]) -> None:
    for token, logits in zip(completion, expected, strict=True):
        if token != logits.argmax():
            assert logits.max() - logits[token] < TIE
            return  # what follows continues another text


@pytest.mark.parametrize("kv_unified", ["true", "false"])
def test_greedy_tokens_in_a_busy_batch_are_those_of_llama_cpp_but_for_ties(
    path: Path, prompts: list[list[int]], expected: list[list[Any]], kv_unified: str
) -> None:
    with opened(path, max_sequences=8, arguments={"kv_unified": kv_unified}) as engine:
        for id, completion in greedy(engine, prompts).items():
            assert_same_but_for_ties(completion, expected[id])


@pytest.mark.parametrize("speculative", ["ngram", "draft_model"])
def test_greedy_tokens_with_proposals_are_those_of_llama_cpp_but_for_ties(
    path: Path, prompts: list[list[int]], expected: list[list[Any]], speculative: str
) -> None:
    draft = path if speculative == "draft_model" else None
    with opened(path, speculative=speculative, draft=draft) as engine:
        for id, completion in greedy(engine, prompts).items():
            assert_same_but_for_ties(completion, expected[id])


def test_log_probabilities_are_those_of_llama_cpp(
    path: Path, prompts: list[list[int]], expected: list[list[Any]]
) -> None:
    with opened(path) as engine:
        done = finished_by_id(engine, request(0, prompts[0], max_tokens=COUNT, logprobs=3))[0]
    entries = [entry for step in done for entry in step.logprobs or ()]
    for entry, logits in zip(entries, expected[0], strict=True):
        values = logits - np.logaddexp.reduce(logits.astype(np.float64))
        ranked = np.argsort(-values)[:3]
        assert [token for token, _ in entry.top] == ranked.tolist()
        np.testing.assert_allclose([logprob for _, logprob in entry.top], values[ranked], atol=1e-4)
        assert entry.logprob == pytest.approx(float(values.max()), abs=1e-4)
        assert entry.rank == 1


@pytest.fixture(scope="module")
def engine() -> Iterator[GenerationEngine]:
    with opened(demo(), batch_invariant=True, max_sequences=8) as engine:
        yield engine


def sampled(prompts: list[list[int]]) -> list[EngineRequest]:
    settings = {"temperature": 0.9, "top_p": 0.9, "max_tokens": COUNT, "ignore_eos": True, "logprobs": 0}
    return [
        EngineRequest(id, prompt, SamplingParams(**settings, seed=7 + id, repetition_penalty=1.1))
        for id, prompt in enumerate(prompts)
    ]


def test_results_do_not_depend_on_the_batch_if_the_model_says_so(
    engine: GenerationEngine, prompts: list[list[int]]
) -> None:
    requests = sampled(prompts) + [request(100 + id, prompt, max_tokens=COUNT) for id, prompt in enumerate(prompts)]
    busy = finished_by_id(engine, *requests)
    for alone in requests:
        done = finished_by_id(engine, alone)[alone.id]
        assert tokens(done) == tokens(busy[alone.id])
        assert logprobs(done) == logprobs(busy[alone.id])


def test_same_seed_gives_the_same_tokens_and_another_seed_others(
    engine: GenerationEngine, prompts: list[list[int]]
) -> None:
    first, again = (tokens(finished_by_id(engine, sampled(prompts)[0])[0]) for _ in range(2))
    assert first == again
    other = sampled(prompts)[0]
    other.sampling.seed = 99
    assert tokens(finished_by_id(engine, other)[0]) != first


def test_penalties_and_bias_change_the_tokens(engine: GenerationEngine, prompts: list[list[int]]) -> None:
    (plain,) = greedy(engine, prompts[:1]).values()
    banned = request(0, prompts[0], max_tokens=COUNT, logit_bias={plain[0]: -100.0})
    assert plain[0] not in tokens(finished_by_id(engine, banned)[0])
    penalised = tokens(finished_by_id(engine, request(0, prompts[-1], max_tokens=60, frequency_penalty=2.0))[0])
    (repeating,) = greedy(engine, prompts[-1:], 60).values()
    assert len(set(penalised)) > len(set(repeating))


@pytest.mark.parametrize("arguments", [{}, {"cache_ram": 0}, {"kv_unified": "false"}], ids=str)
def test_prefix_is_reused_and_gives_the_same_tokens(
    path: Path, prompts: list[list[int]], arguments: dict[str, Any]
) -> None:
    prompt = prompts[-1]
    with opened(path, prefix_caching=False) as engine:
        (without,) = greedy(engine, [prompt]).values()
        assert engine.usage().prefix_hits == 0
    with opened(path, max_sequences=4, arguments=arguments) as engine:
        first, second = (greedy(engine, [prompt])[0] for _ in range(2))
        assert engine.usage().prefix_hits > len(prompt) // 2
        branch = [*prompt[: len(prompt) // 2], *prompts[0]]
        assert greedy(engine, [branch, prompt])[1] == without
    assert first == second == without


def test_saved_prefix_gives_the_same_tokens(path: Path, prompts: list[list[int]], expected: list[list[Any]]) -> None:
    with opened(path, max_sequences=8) as engine:
        for prompt in prompts:
            greedy(engine, [prompt])
        hits = engine.usage().prefix_hits
        # Sequences that start and end at other times leave gaps in the cache, into which the saved tokens go.
        completions = greedy(engine, [*prompts, prompts[-1]])
        assert engine.usage().prefix_hits - hits >= 2 * (len(prompts[-1]) // 32 * 32)
        assert greedy(engine, [prompts[-1]])[0] == best(expected[-1])
    for completion, logits in zip(completions.values(), [*expected, expected[-1]], strict=True):
        assert_same_but_for_ties(completion, logits)


@pytest.mark.parametrize("arguments", [{}, {"cache_ram": 0}, {"kv_unified": "false"}], ids=str)
def test_prefix_of_a_model_with_a_sliding_window_gives_the_same_tokens(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    path = write(tmp_path / "m.gguf", "gemma3", sliding_window=24)
    prompt = [3 + 7 * index * index % 89 for index in range(200)]
    prompts = [prompt, [*prompt[:100], 5, 6], [*prompt[:40], 7, 8], [*prompt, 9]]
    with opened(path, dtype="float32", prefix_caching=False) as engine:
        wanted = [greedy(engine, [prompt], 12)[0] for prompt in prompts]
    with opened(path, dtype="float32", max_sequences=4, arguments=arguments) as engine:
        assert [greedy(engine, [prompt], 12)[0] for prompt in prompts] == wanted
        assert engine.usage().prefix_hits == 96 + 32 + 192


def test_prefix_in_cells_that_llama_cpp_used_again_is_computed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gemma3", sliding_window=24)
    long = [3 + 7 * index * index % 89 for index in range(110)]
    requests = [
        request(0, [4] * 60, max_tokens=1),  # leaves empty cells before those of the next
        request(1, long, max_tokens=120),
        request(2, [5, 6, 7], max_tokens=70),
        request(3, [*long[:70], 8], max_tokens=12),
    ]
    with opened(path, dtype="float32", prefix_caching=False) as engine:
        wanted = {alone.id: tokens(finished_by_id(engine, alone)[alone.id]) for alone in requests}
    with opened(path, dtype="float32", max_sequences=4, cache_tokens=512) as engine:
        done: dict[int, list[int]] = {id: [] for id in wanted}
        for added in requests[:2]:
            engine.add(added)
        while engine.busy:
            for progress in engine.step():
                done[progress.id] += progress.tokens
            for added, reached in ((requests[2], 1), (requests[3], 75)):
                if len(done[1]) == reached:
                    engine.add(added)
    assert done == wanted


def test_cancelled_request_does_not_change_the_others(prompts: list[list[int]]) -> None:
    with opened(demo(), batch_invariant=True, max_sequences=8) as engine:
        wanted = greedy(engine, prompts)
        for id, prompt in enumerate(prompts):
            engine.add(request(id, prompt, max_tokens=COUNT))
        completions: dict[int, list[int]] = {id: [] for id in range(len(prompts))}
        for step in range(200):
            if step == 5:
                engine.cancel(0)
                engine.cancel(len(prompts) - 1)
            for progress in engine.step():
                completions[progress.id] += progress.tokens
        assert not engine.busy
        assert engine.usage().used_tokens == 0
        for id in range(1, len(prompts) - 1):
            assert completions[id] == wanted[id]
        assert len(completions[0]) < COUNT


def test_sequences_that_do_not_fit_into_the_cache_are_preempted_and_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama")
    prompts = [[3 + id, *range(20, 30 + id)] for id in range(6)]
    with opened(path, dtype="float32") as engine:
        wanted = {id: greedy(engine, [prompt], 100)[0] for id, prompt in enumerate(prompts)}
    with opened(path, cache_tokens=256, dtype="float32", prefix_caching=False) as engine:
        assert greedy(engine, prompts, 100) == wanted
        assert engine.usage().preemptions > 0


@pytest.mark.parametrize(
    ("structure", "whole"),
    [
        (Structure("choice", '["cat", "dog"]'), r"cat|dog"),
        (Structure("regex", r"[0-9]{4}-[0-9]{2}"), r"\d{4}-\d{2}"),
        (Structure("json", '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],'
         ' "additionalProperties": false}'), r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
        (Structure("grammar", 'root ::= "yes" | "no"'), r"yes|no"),
    ],
)  # fmt: skip
def test_structured_output_beside_other_sequences(
    engine: GenerationEngine, prompts: list[list[int]], structure: Structure, whole: str
) -> None:
    tokenizer = open_gguf(read_gguf(demo()))
    others = [request(10 + id, prompt, max_tokens=8) for id, prompt in enumerate(prompts)]
    structured = request(0, prompts[0], max_tokens=60, ignore_eos=False, structured_outputs=structure)
    done = finished_by_id(engine, *others[:3], structured, *others[3:])
    text = tokenizer.decode([token for token in tokens(done[0]) if token not in tokenizer.special.eos_ids])
    assert re.fullmatch(whole, text), text
    assert done[0][-1].finish == "stop"


def test_beams_are_more_likely_than_greedy_tokens(prompts: list[list[int]]) -> None:
    with opened(demo()) as engine:
        assert Feature.BEAMS in engine.features
        beams = finished_by_id(engine, request(0, prompts[0], max_tokens=8, beam_width=4, n=2, logprobs=0))[0]
        alone = finished_by_id(engine, request(0, prompts[0], max_tokens=8, logprobs=0))[0]
    assert [len(beam.tokens) for beam in beams] == [8, 8]
    assert beams[0].cumulative_logprob is not None
    assert beams[0].cumulative_logprob >= sum(logprobs(alone)) - 1e-3


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_recurrent_model_gives_the_tokens_of_transformers_alone_and_in_a_batch(
    tmp_path: Path, batch_invariant: bool
) -> None:
    network = write_mamba(tmp_path / "m.gguf")
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12], list(range(3, 60))]
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [network.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    with opened(tmp_path / "m.gguf", max_sequences=4, batch_invariant=batch_invariant) as engine:
        assert Feature.BEAMS not in engine.features
        for prompt, completion in zip(prompts, wanted, strict=True):
            assert greedy(engine, [prompt], 20)[0] == completion
        assert list(greedy(engine, prompts * 2, 20).values()) == wanted * 2


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_of_the_reference_is_computed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.gguf", name)
    with opened(path, dtype="float32") as engine:
        prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12], list(range(3, 90))]
        result = verify_gguf(engine, read_gguf(path), prompts, 2)
    assert result.startswith("24 of 24 tokens agree"), result


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "TQ1_0", "TQ2_0"]
)
def test_weights_of_every_type_are_computed(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.1}
    path = write(tmp_path / "m.gguf", "llama", kind, **sizes)
    with opened(path) as engine:
        result = verify_gguf(engine, read_gguf(path), [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 11, 12]], 2)
    assert not result.startswith("not checked"), result
