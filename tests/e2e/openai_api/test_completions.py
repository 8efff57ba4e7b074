"""Completions, asked by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest


def test_prompt_is_continued(client: Any) -> None:
    answer = client.completions.create(model="talker", prompt="one two three", max_tokens=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("one two ", "length", None)
    assert (answer.object, answer.id[:5], answer.usage.total_tokens) == ("text_completion", "cmpl-", 5)


def test_several_prompts_have_several_choices(client: Any) -> None:
    answer = client.completions.create(model="talker", prompt=["a b", "c d"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a b"),
        (1, "ba "),
        (2, "c d"),
        (3, "dc "),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


def test_prompt_is_repeated(client: Any) -> None:
    assert client.completions.create(model="talker", prompt="a b", echo=True).choices[0].text == "a ba b"
    chunks = client.completions.create(model="talker", prompt="a b", echo=True, stream=True)
    assert [chunk.choices[0].text for chunk in chunks] == ["a ba ", "b", ""]


def test_log_probabilities_of_a_completion(client: Any) -> None:
    found = client.completions.create(model="talker", prompt="one two", logprobs=1).choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["one ", "two"], [-0.5, -0.5], [0, 4])
    assert found.top_logprobs == [{"t0": 0.0, "one ": -0.5}, {"t0": 0.0, "two": -0.5}]


def test_completions_come_in_pieces(client: Any) -> None:
    chunks = list(client.completions.create(model="talker", prompt=["a b", "c"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == 0) == "a b"
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == 1) == "c"
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("stop") == 2


def test_model_with_a_tensor_for_each_value(client: Any) -> None:
    answer = client.completions.create(model="separate", prompt="hi", stop=["x", "y"], temperature=0.5, seed=7, n=1)
    assert json.loads(answer.choices[0].text) == {
        "text_input": [["hi"]], "max_tokens": [[16]], "stop_words": [["x", "y"]], "temperature": [[0.5]],
        "random_seed": [[7]], "stream": [[False]],
    }  # fmt: skip
    assert (answer.choices[0].finish_reason, answer.usage) == ("stop", None)
    chunks = list(client.completions.create(model="separate", prompt="hi", stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == ["stop"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="separate", prompt="hi", presence_penalty=1)
    assert caught.value.param == "presence_penalty"
