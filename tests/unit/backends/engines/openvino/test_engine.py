"""The engine over OpenVINO: the same tokens as transformers, alone and in a busy batch; ends, beams, adapters."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openvino")
pytest.importorskip("torch")

from conch.backends.generation.engine import EngineRequest, GenerationEngine, Progress
from conch.backends.generation.lora import LoraWeights
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure
from tests.unit.backends.engines.driving import finished, generate
from tests.unit.backends.engines.openvino.models import EOS, SIZES, greedy, opened, prompts
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level


@pytest.fixture(scope="module")
def engine(directory: Path) -> GenerationEngine:
    return opened(directory, max_batched_tokens=256)


def test_alone_tokens_are_those_of_transformers(engine: GenerationEngine, module: Any) -> None:
    for prompt in prompts(6):
        assert generate(engine, prompt, max_tokens=24, temperature=0) == greedy(module, prompt, 24)


@pytest.mark.parametrize("cache_tokens", [2048, 320], ids=["room", "preemption"])
def test_in_a_busy_batch_they_are_too(directory: Path, module: Any, cache_tokens: int) -> None:
    """Sequences come and are given up while others run; the smaller cache does not hold them all."""
    engine = opened(directory, cache_tokens=cache_tokens, max_batched_tokens=64)
    source = random.Random(7)
    asked = prompts(24)
    lengths = [source.randrange(1, 80) for _ in asked]
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    cancelled: set[int] = set()
    while len(tokens) < len(asked) or engine.busy:
        if len(tokens) < len(asked) and (not engine.busy or source.random() < 0.6):
            number = len(tokens)
            tokens[number] = []
            sampling = SamplingParams(max_tokens=lengths[number], temperature=0)
            engine.add(EngineRequest(number, asked[number], sampling, priority=source.randrange(3)))
        if source.random() < 0.1:
            number = source.choice(list(tokens))
            engine.cancel(number)
            cancelled |= {number} - ends.keys()
        for progress in engine.step():
            assert progress.id not in cancelled and progress.error is None
            tokens[progress.id] += progress.tokens
            if progress.finish:
                ends[progress.id] = progress.finish
        assert engine.usage().used_tokens <= cache_tokens
    assert cancelled and ends.keys() | cancelled == tokens.keys()
    for number in ends:
        assert tokens[number] == greedy(module, asked[number], lengths[number])
        assert ends[number] == ("stop" if tokens[number][-1] == EOS else "length")
    usage = engine.usage()
    assert (usage.running, usage.waiting, usage.used_tokens) == (0, 0, 0)
    assert (usage.preemptions > 0) == (cache_tokens < 1000)


@pytest.mark.parametrize("speculative", ["ngram", "draft_model"])
def test_with_proposals_they_are_too(directory: Path, module: Any, speculative: str, tmp_path: Path) -> None:
    draft = None
    if speculative == "draft_model":
        draft = shutil.copytree(directory, tmp_path / "draft")
        (draft / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
        (draft / "tokenizer.json").write_text(byte_level().to_str())
    engine = opened(directory, speculative=speculative, draft=draft)
    asked = [[*prompt, *prompt[:8]] for prompt in prompts(6)]
    for number, prompt in enumerate(asked):
        engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=24, temperature=0)))
    done = finished(engine)
    for number, prompt in enumerate(asked):
        steps = [progress.tokens for progress in done if progress.id == number]
        expected = greedy(module, prompt, 24)
        assert [token for tokens in steps for token in tokens] == expected
        if draft is not None and len(expected) == 24:
            assert len(steps) < 8


def test_prompts_that_begin_alike_share_the_cache(directory: Path, module: Any) -> None:
    engine = opened(directory)
    common = next(ids for ids in prompts(9) if len(ids) > 70)[:70]
    asked = [[*common, *rest] for rest in ([5], [6, 7], [8], [])]
    assert generate(engine, asked[0], max_tokens=12, temperature=0) == greedy(module, asked[0], 12)
    for number, prompt in enumerate(asked):
        engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=12, temperature=0)))
    done = finished(engine)
    for number, prompt in enumerate(asked):
        made = [token for progress in done if progress.id == number for token in progress.tokens]
        assert made == greedy(module, prompt, 12)
    usage = engine.usage()
    assert (usage.prefix_queries, usage.prefix_hits) == (71 + sum(map(len, asked)), 4 * 64)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_invariant_results_do_not_depend_on_the_batch(directory: Path, dtype: str) -> None:
    engine = opened(directory, dtype=dtype, batch_invariant=True, cache_tokens=1024)
    assert engine.batch_invariant
    requests = [
        EngineRequest(number, prompt, SamplingParams(max_tokens=16, temperature=0, logprobs=2))
        for number, prompt in enumerate([[*ids, *ids, *ids] for ids in prompts(6)])
    ]
    alone = [[(progress.tokens, progress.logprobs) for progress in finished(engine, one)] for one in requests]
    together = finished(engine, *requests)
    for number, expected in enumerate(alone):
        assert [(step.tokens, step.logprobs) for step in together if step.id == number] == expected


def test_what_is_cancelled_is_forgotten_and_its_cache_is_free(engine: GenerationEngine) -> None:
    engine.add(EngineRequest(1, [5] * 70, SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.add(EngineRequest(2, [6] * 70, SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    both = engine.usage()
    assert (both.running, both.waiting) == (2, 0) and both.used_tokens >= 140
    engine.cancel(1)
    assert {progress.id for progress in engine.step()} == {2}
    engine.step()
    assert 70 <= engine.usage().used_tokens < both.used_tokens
    engine.cancel(2)
    engine.cancel(3)
    usage = engine.usage()
    assert (usage.running, usage.waiting, usage.used_tokens) == (0, 0, 0)
    assert not engine.busy and engine.step() == []


def test_what_waits_goes_by_priority_and_can_be_cancelled(directory: Path) -> None:
    engine = opened(directory, max_sequences=1)
    for number, priority in enumerate([5, 9, 0, 9]):
        engine.add(EngineRequest(number, [7], SamplingParams(max_tokens=2, ignore_eos=True), priority))
    assert engine.usage().waiting == 4
    engine.cancel(3)
    assert [progress.id for progress in finished(engine)] == [2, 2, 0, 0, 1, 1]


def test_stop_tokens_end_a_sequence_and_are_among_its_tokens(engine: GenerationEngine, module: Any) -> None:
    prompt = prompts(1)[0]
    tokens = greedy(module, prompt, 12)
    stop = tokens[3]
    place = tokens.index(stop)
    engine.add(EngineRequest(1, prompt, SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))))
    found = finished(engine)
    assert [token for progress in found for token in progress.tokens] == tokens[: place + 1]
    assert [progress.finish for progress in found] == [""] * place + ["stop"]
    ends: tuple[dict[str, Any], ...] = ({"end_id": stop}, {"ignore_eos": True, "stop_token_ids": (stop,)})
    for end in ends:
        assert generate(engine, prompt, max_tokens=12, temperature=0, **end) == tokens[: place + 1]
    assert len(generate(engine, prompt, max_tokens=12, temperature=0, stop_token_ids=(stop,), min_tokens=8)) >= 8


def test_seeds_are_kept_whatever_else_runs(engine: GenerationEngine) -> None:
    prompt = prompts(1)[0]

    def drawn(seed: int | None) -> list[int]:
        return generate(engine, prompt, max_tokens=20, temperature=1.2, seed=seed)

    alone = drawn(2**64 - 5)
    assert alone == drawn(2**64 - 5) != drawn(4)
    assert drawn(None) != drawn(None)
    for number in range(4):
        engine.add(EngineRequest(number, [9, 10 + number], SamplingParams(max_tokens=20)))
    engine.add(EngineRequest(9, prompt, SamplingParams(max_tokens=20, temperature=1.2, seed=2**64 - 5)))
    assert [token for progress in finished(engine) if progress.id == 9 for token in progress.tokens] == alone


def test_log_probabilities_of_chosen_tokens_and_of_others(engine: GenerationEngine, module: Any) -> None:
    import torch

    prompt = prompts(1)[0]
    engine.add(EngineRequest(1, prompt, SamplingParams(max_tokens=5, temperature=0, logprobs=3)))
    found = finished(engine)
    tokens = [token for progress in found for token in progress.tokens]
    with torch.no_grad():
        logits = module(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    for place, progress in enumerate(found):
        assert progress.logprobs is not None
        [one] = progress.logprobs
        assert one.logprob == pytest.approx(float(expected[place, tokens[place]]), abs=1e-4)
        best = expected[place].topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert one.rank == 1


def test_log_probabilities_of_the_prompt(engine: GenerationEngine, module: Any) -> None:
    import torch

    [prompt] = prompts(1)
    engine.add(EngineRequest(1, prompt, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)))
    [progress] = finished(engine)
    with torch.inference_mode():
        expected = module(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert progress.prompt_logprobs is not None
    assert [entry.logprob for entry in progress.prompt_logprobs] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, prompt[1:], strict=False)], abs=1e-4
    )


def test_beams_come_at_the_end_best_first(engine: GenerationEngine, module: Any) -> None:
    import torch

    prompt = prompts(1)[0]
    engine.add(EngineRequest(1, prompt, SamplingParams(max_tokens=10, beam_width=4, n=3)))
    found: list[Progress] = finished(engine)
    with torch.no_grad():
        expected = module.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, num_beams=4, num_return_sequences=3,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    wanted = expected.sequences[:, len(prompt) :].tolist()
    assert [list(progress.tokens) for progress in found] == wanted
    assert [progress.beam for progress in found] == [0, 1, 2]
    assert all(progress.finish == "length" for progress in found)
    sums = [progress.cumulative_logprob for progress in found]
    assert sums == pytest.approx((expected.sequences_scores * 10).tolist(), abs=1e-3)


def test_repetition_penalty(engine: GenerationEngine, module: Any) -> None:
    import torch

    prompt = prompts(1)[0]
    with torch.no_grad():
        ids = module.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0, repetition_penalty=1.4
        )
    made = generate(engine, prompt, max_tokens=16, temperature=0, repetition_penalty=1.4)
    assert made == ids[0, len(prompt) :].tolist()


def test_every_feature_but_structure_and_adapters_needs_nothing_more(engine: GenerationEngine) -> None:
    needed = {Feature.LORA, Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE}
    assert engine.features == frozenset(Feature) - needed


def test_biases_bans_and_penalties_change_the_tokens(engine: GenerationEngine) -> None:
    prompt = prompts(1)[0]
    first = generate(engine, prompt, max_tokens=1, temperature=0)[0]
    changes: tuple[dict[str, Any], ...] = ({"logit_bias": {first: -100.0}}, {"bad_words_token_ids": ((first,),)})
    for change in changes:
        assert first not in generate(engine, prompt, max_tokens=8, temperature=0, **change)
    biased = generate(engine, prompt, max_tokens=8, temperature=0, logit_bias={9: 100.0})
    assert biased == [9] * 8
    varied = generate(engine, prompt, max_tokens=8, temperature=0, logit_bias={9: 3.0}, frequency_penalty=2.0)
    assert len(set(varied)) > 1


@pytest.mark.parametrize("loaded", [False, True])
def test_an_adapter_changes_the_weights(directory: Path, module: Any, tmp_path: Path, loaded: bool) -> None:
    import copy

    import torch
    from safetensors.torch import save_file

    merged, tensors = copy.deepcopy(module), {}
    torch.manual_seed(9)
    for layer in range(SIZES["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.{'o_proj' if layer else 'q_proj'}"
        down, up = torch.randn(4, 64) * 0.3, torch.randn(64, 4) * 0.3
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        merged.get_submodule(name).weight.data += 2 * up @ down
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    if loaded:
        engine = opened(directory, adapter_folders=[tmp_path])
        engine.attach_adapter("french", LoraWeights.read(tmp_path))
        engine.attach_adapter("other", LoraWeights.read(tmp_path))
        engine.detach_adapter("other")
    else:
        engine = opened(directory, adapters={"french": tmp_path})
        assert engine.adapters == ("french",)
    assert Feature.LORA in engine.features
    asked = prompts(6)
    for number, prompt in enumerate(asked):
        adapter = "french" if number % 2 else ""
        engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=12, temperature=0, lora_name=adapter)))
    tokens: dict[int, list[int]] = {number: [] for number in range(len(asked))}
    for progress in finished(engine):
        tokens[progress.id] += progress.tokens
    for number, prompt in enumerate(asked):
        assert tokens[number] == greedy(merged if number % 2 else module, prompt, 12)


def test_without_a_tokenizer_there_are_no_grammars(engine: GenerationEngine) -> None:
    assert not engine.features & {Feature.JSON, Feature.REGEX, Feature.GRAMMAR, Feature.CHOICE}
    assert list(SamplingParams(structured_outputs=Structure("regex", "a")).features()) == [Feature.REGEX]
