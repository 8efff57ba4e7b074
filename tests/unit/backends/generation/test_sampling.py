"""The sampling parameters of a request: read, typed, refused by name, and checked against the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.backends.generation.sampling import Defaults, Limits, SamplingOverrides, read_document
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature, SamplingParams
from conch.core.sampling.structures import Structure
from tests.unit.backends.generation.fake_engine import FakeEngine


def overrides(**values: Any) -> SamplingOverrides:
    result = SamplingOverrides()
    read_document(result, json.dumps(values), "sampling_parameters")
    result.check()
    return result


def structure(**values: Any) -> Any:
    return overrides(**values).get("structured_outputs")


def test_names_of_the_field_and_texts_for_numbers() -> None:
    result = overrides(max_tokens="100", temperature="0", top_k=-1, stop="\n", seed=7, logit_bias={"5": -100})
    assert result.values == {
        "max_tokens": 100, "temperature": 0.0, "top_k": 0, "seed": 7, "stop": ("\n",), "logit_bias": {5: -100.0}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "sampling parameter 'max_tokens' is 0; it must be a whole number of at least 1"),
        ({"max_tokens": 1e300}, "sampling parameter 'max_tokens' is 1e+300; it must be a whole number of at least 1"),
        ({"max_tokens": True}, "sampling parameter 'max_tokens' is true; it must be a whole number of at least 1"),
        ({"temperature": -1}, "sampling parameter 'temperature' is -1; it must be a number of at least 0"),
        ({"temperature": "hot"}, """sampling parameter 'temperature' is "hot"; it must be a number of at least 0"""),
        ({"top_p": 0}, "sampling parameter 'top_p' is 0; it must be a number above 0 and at most 1"),
        ({"presence_penalty": 3}, "sampling parameter 'presence_penalty' is 3; it must be a number from -2 to 2"),
        ({"n": 1000}, "sampling parameter 'n' is 1000; it must be a whole number of at least 1 and at most 64"),
        ({"stop": ["x"] * 1000}, "'stop' has 1000 stop strings; at most 128 are allowed"),
        ({"stop": ["x" * 2000]}, "'stop' has a stop string of 2000 characters; at most 1024 are allowed"),
        ({"stop": 3}, "sampling parameter 'stop' is 3; it must be a text or a list of texts"),
        (
            {"logit_bias": {str(id): 1 for id in range(1025)}},
            "'logit_bias' has 1025 token ids; at most 1024 are allowed",
        ),
        (
            {"length_penalty": 100},
            "sampling parameter 'length_penalty' is 100; it must be a number from -10 to 10",
        ),
        ({"hotness": 1}, "sampling parameter 'hotness' is not known"),
        ({"temprature": 1}, "sampling parameter 'temprature' is not known; did you mean 'temperature'?"),
        ({"allowed_token_ids": [1]}, "sampling parameter 'allowed_token_ids' is not supported"),
        (
            {"min_tokens": 9, "max_tokens": 4},
            "min_tokens in 'sampling_parameters' is 9, which is more than max_tokens in 'sampling_parameters', 4",
        ),
        ({"n": 2, "temperature": 0}, "n is 2, but with temperature 0 all samples are the same: n must be 1"),
        (
            {"beam_width": 4, "temperature": 0.5},
            "beam search does not sample: temperature must be 0 or absent, not 0.5",
        ),
        ({"beam_width": 2, "n": 3}, "n is 3, which is more than the beam width, 2"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "'structured_outputs' must be an object with exactly one of json, regex, grammar, choice, json_object",
        ),
        ({"structured_outputs": {"choice": []}}, "'structured_outputs' must be a list of texts to choose from"),
        (
            {"response_format": {"type": "xml"}},
            "'response_format' must be of type text, json_object or json_schema (with its json_schema)",
        ),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        overrides(**values)
    assert caught.value.message == message
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("text", ['{"temperature": 1%s}', '{"logit_bias": {"1": 1%s}}'])
def test_numbers_beyond_any_float_are_refused(text: str) -> None:
    with pytest.raises(ConchError, match=r"sampling parameter '\w+' is .*; it must be") as caught:
        read_document(SamplingOverrides(), text % ("0" * 400), "sampling_parameters")
    assert caught.value.code is Code.INVALID_ARG


def test_two_names_for_one_thing_must_agree() -> None:
    result = overrides(max_tokens=5)
    assert result.set("max_tokens", 5, "input 'max_tokens'")
    with pytest.raises(ConchError, match=r"input 'max_tokens' is 6, but max_tokens in 'sampling_parameters' is 5"):
        result.set("max_tokens", 6, "input 'max_tokens'")


def test_structured_output_in_all_its_spellings() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = Structure("json", json.dumps(schema))
    assert structure(structured_outputs={"json": schema}) == expected
    assert structure(structured_outputs=json.dumps({"json": json.dumps(schema)})) == expected
    assert structure(response_format={"type": "json_schema", "json_schema": {"schema": schema}}) == expected
    assert structure(structured_outputs={"choice": ["a", "b"]}) == Structure("choice", '["a", "b"]')
    assert structure(response_format={"type": "text"}) is None


def test_decoding_is_greedy_unless_something_says_otherwise() -> None:
    greedy = Defaults()
    assert greedy.sampling(overrides(), 100).temperature == 0
    assert greedy.sampling(overrides(top_k=1), 100).temperature == 0
    assert greedy.sampling(overrides(top_k=10), 100).temperature == 1
    assert greedy.sampling(overrides(temperature=0.5), 100).temperature == 0.5
    assert greedy.sampling(overrides(temperature=1e-45), 100).temperature == 0
    sampling = Defaults.of_checkpoint({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20})
    assert sampling.sampling(overrides(), 100).top_k == 20
    assert sampling.sampling(overrides(temperature=0), 100).top_k == 0
    assert sampling.sampling(overrides(beam_width=3), 100).temperature == 0


@pytest.mark.parametrize(
    ("generation", "own", "temperature"),
    [
        ({}, None, 1.0),
        ({"do_sample": False, "temperature": 0.6}, None, 0.0),
        ({"do_sample": True, "temperature": 0.6}, None, 0.6),
        ({"do_sample": True, "temperature": 0.6}, 0.0, 0.0),
        ({}, 0.3, 0.3),
    ],
)
def test_default_of_the_request_applies_where_the_model_has_none(
    generation: dict[str, Any], own: float | None, temperature: float
) -> None:
    defaults = Defaults.of_checkpoint(generation, temperature=own)
    assert defaults.sampling(overrides(), 100, temperature=1.0).temperature == temperature
    assert defaults.sampling(overrides(temperature=0.9), 100, temperature=1.0).temperature == 0.9
    assert defaults.sampling(overrides(beam_width=2), 100, temperature=1.0).temperature == 0


def test_the_number_of_tokens_is_bounded_by_the_room_where_nobody_chose_it() -> None:
    assert Defaults(max_tokens=256).sampling(overrides(), 10).max_tokens == 10
    assert Defaults(max_tokens=256).sampling(overrides(max_tokens=50), 10).max_tokens == 50
    assert Defaults.of_vllm().sampling(overrides(), 100).max_tokens == 16


def test_a_client_is_told_that_a_library_is_missing_and_not_where_the_server_installs_it() -> None:
    engine = FakeEngine()
    engine.lacking = frozenset({Feature.GRAMMAR})
    with pytest.raises(ConchError) as refused:
        Limits(engine).check_features(SamplingParams(structured_outputs=Structure("grammar", "root ::= x")))
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message == (
        "engine 'fake' does not have structured output by grammar: a library for it is not installed"
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([3] * 64, SamplingParams(), "the prompt has 64 tokens, but the context of the model is 64"),
        ([3], SamplingParams(max_tokens=64), "together more than the context of the model, 64"),
        ([256], SamplingParams(max_tokens=1), "input has token id 256; the vocabulary of the model has 256 tokens"),
        (
            [3] * 10,
            SamplingParams(max_tokens=20, beam_width=4),
            "4 beams of up to 30 tokens do not fit into the KV cache of the model, 100 tokens",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: list[int], sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ConchError, match=message) as refused:
        Limits(FakeEngine(cache_tokens=100)).check(prompt, sampling)
    assert refused.value.code is Code.INVALID_ARG
