"""Requests become those of vLLM, against a stand-in for the package, and its outputs become completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.backends.batching.json_schemas import rewrite
from conch.backends.generation.engine import EngineRequest, EngineUsage, TokenLogprobs
from conch.backends.generation.generation_backend import open_engine
from conch.backends.generation.service import BROKEN
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import SamplingParams as Sampling
from conch.core.sampling.structures import Structure
from tests.fakes.vllm import RequestOutputKind, SamplingParams, StructuredOutputsParams, engines
from tests.unit.backends.engines.vllm.conftest import spec


def run(engine: Any) -> list[tuple[int, list[int], str]]:
    return [(one.id, list(one.tokens), one.finish) for one in engine.step()]


def test_model_is_not_compared_with_arguments_that_change_what_it_computes() -> None:
    engine = open_engine("vllm", spec(arguments={"quantization": "fp8"}))
    assert engine.verify([[5], [50, 51]]) == (
        "not checked: the engine argument 'quantization' changes what vLLM computes"
    )
    assert engine.usage() == EngineUsage()


def test_sequences_are_continued_step_by_step() -> None:
    engine = open_engine("vllm", spec())
    assert (engine.context, engine.max_sequences, engine.vocabulary) == (512, 256, 1000)
    assert (engine.cache_tokens, engine.block_tokens) == (1600, 16)
    assert engine.step() == []
    engine.add(EngineRequest(1, [5], Sampling(max_tokens=2), priority=1))
    engine.add(EngineRequest(2, [97], Sampling(max_tokens=5), priority=2))
    engine.add(EngineRequest(3, [50], Sampling(max_tokens=5), priority=0))
    assert (engine.usage().running, engine.usage().waiting) == (3, 0)
    assert run(engine) == [(3, [51], ""), (1, [6], "")]
    load = engine.usage()
    assert (load.running, load.waiting, load.used_tokens) == (2, 1, 400)
    assert (load.prefix_queries, load.prefix_hits, load.preemptions) == (8, 4, 1)
    engine.cancel(3)
    engine.cancel(3)
    assert engines[-1].aborted == ["3"]
    assert run(engine) == [(1, [7], "length"), (2, [98], "")]
    assert run(engine) == [(2, [99], "stop")]
    assert not engine.busy
    load = engine.usage()
    assert (load.running, load.waiting, load.used_tokens, load.prefix_queries) == (0, 0, 0, 24)
    engine.close()
    assert engines[-1].aborted == ["3", "shutdown"]


def test_parameters_are_passed_on() -> None:
    engine = open_engine("vllm", spec())
    engine.add(
        EngineRequest(
            1,
            [5, 6],
            Sampling(
                max_tokens=7,
                min_tokens=1,
                temperature=0.5,
                top_p=0.9,
                min_p=0.1,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                seed=4,
                stop_token_ids=(8,),
                bad_words_token_ids=((1, 2), (3,)),
                logit_bias={4: 1.5},
                prompt_logprobs=1,
                structured_outputs=Structure("choice", '["a", "b"]'),
            ),
        )
    )
    prompt, params, adapter, priority = engines[-1].requests["1"]
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert (adapter, priority) == (None, 0)
    assert params == SamplingParams(
        max_tokens=7,
        min_tokens=1,
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=4,
        stop_token_ids=[8, 99],
        ignore_eos=False,
        logit_bias={4: 1.5},
        logprobs=None,
        prompt_logprobs=1,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        _bad_words_token_ids=[[1, 2], [3]],
    )
    ends = {"end_id": 7}, {"ignore_eos": True}, {"ignore_eos": True, "end_id": 7, "stop_token_ids": (8,)}
    for number, settings in enumerate(ends, 2):
        engine.add(EngineRequest(number, [5], Sampling(**settings)))  # type: ignore[arg-type]
    found = [engines[-1].requests[str(number)][1] for number in (2, 3, 4)]
    assert [(one.stop_token_ids, one.ignore_eos) for one in found] == [([7], True), ([], True), ([8], True)]
    engine.add(EngineRequest(5, [5], Sampling(structured_outputs=Structure("json", "{}"))))
    assert engines[-1].requests["5"][1].structured_outputs == StructuredOutputsParams(json="{}")


def test_llguidance_gets_schemas_for_which_it_allows_only_valid_texts() -> None:
    numbers = Structure("json", '{"anyOf": [{"type": "integer", "x": 1}], "items": [{"type": "null"}]}')
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5], Sampling(structured_outputs=numbers)))
    given = engines[-1].requests["1"][1].structured_outputs.json
    assert json.loads(given) == rewrite(json.loads(numbers.text))
    unique = '{"items": {"type": "string"}, "uniqueItems": true}'
    for text, message in (('{"not": {}}', "'not'"), (unique, "'uniqueItems' is not supported for these items")):
        with pytest.raises(ConchError, match=message) as refused:
            engine.add(EngineRequest(2, [5], Sampling(structured_outputs=Structure("json", text))))
        assert refused.value.param == "structured_outputs"
    other = open_engine("vllm", spec(arguments={"structured_outputs_config": {"backend": "xgrammar"}}))
    other.add(EngineRequest(1, [5], Sampling(structured_outputs=numbers)))
    assert engines[-1].requests["1"][1].structured_outputs.json == numbers.text


def test_log_probabilities_and_failures_are_reported() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5], Sampling(max_tokens=1, logprobs=2)))
    engine.add(EngineRequest(2, [665], Sampling(max_tokens=5)))
    first, second = engine.step()
    assert first.logprobs is not None
    [found] = first.logprobs
    assert (found.logprob, found.rank, found.top) == (-7.0, 7, [(11, -1.0), (12, -2.0)])
    assert second.error is not None
    assert second.error.message == "vLLM ended the request: error"
    assert not engine.busy


def test_log_probabilities_of_the_prompt_come_with_the_first_token() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [5, 6, 7], Sampling(max_tokens=2, prompt_logprobs=1)))
    [first], [second] = engine.step(), engine.step()
    assert first.prompt_logprobs == [TokenLogprobs(-7.0, 7, [(9, -0.5)])] * 2
    assert second.prompt_logprobs is None


def test_structure_that_vllm_cannot_compile_is_an_invalid_argument() -> None:
    engine = open_engine("vllm", spec())
    engine.add(EngineRequest(1, [665], Sampling(structured_outputs=Structure("json", "{}"))))
    engine.add(EngineRequest(2, [664], Sampling(structured_outputs=Structure("json", "{}"))))
    refused, _ = engine.step()
    assert refused.error is not None
    assert (refused.error.code, refused.error.message) == (Code.INVALID_ARG, "vLLM cannot compile this json")
    assert refused.error.param == "structured_outputs"
    [failed] = engine.step()
    assert failed.error is not None
    assert failed.error.code is Code.INTERNAL


def test_dead_vllm_process_ends_an_idle_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    open_engine("vllm", spec(arguments={"tensor_parallel_size": 2}))
    [died] = engines[-1].callbacks
    died()
    assert exits == [BROKEN]


def test_code_for_log_probabilities_is_compiled_at_load_and_leaves_no_trace() -> None:
    engine = open_engine("vllm", spec())
    assert engines[-1].made == {"0": 1}
    assert engines[-1].forgotten
    assert not engine.busy
    assert engine.usage() == EngineUsage()


def test_requests_that_vllm_refuses_are_refused_in_one_sentence() -> None:
    engine = open_engine("vllm", spec())
    with pytest.raises(ConchError, match=r"^temperature must be in \[0, 2\], got 3$") as refused:
        engine.add(EngineRequest(1, [5], Sampling(temperature=3)))
    assert (refused.value.code, refused.value.param) == (Code.INVALID_ARG, "temperature")
    with pytest.raises(ConchError, match=r"^top_p must be in \(0, 1\]$") as refused:
        engine.add(EngineRequest(2, [5], Sampling(top_p=2)))
    assert (refused.value.code, refused.value.param) == (Code.INVALID_ARG, "top_p")
    with pytest.raises(ConchError, match=r"^The decoder prompt \(length 101\) is longer than the maximum$"):
        engine.add(EngineRequest(1, [5] * 101, Sampling()))
    assert not engine.busy
