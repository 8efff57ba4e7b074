"""Chats, asked by OpenAI's client; the models say what they got."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.openai_api.asking import TOOL, say


def test_chat_is_answered(client: Any) -> None:
    answer = client.chat.completions.create(**say("good day to you"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant", "good day to you", "stop",
    )  # fmt: skip
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "talker"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4, 8)


def test_answer_ends_at_max_tokens(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(**say("one two three"), **{name: 2})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two ", "length")


def test_model_gets_what_the_client_asks(client: Any) -> None:
    answer = client.chat.completions.create(
        model="talker",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"Bonn"}'}}
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "user", "content": "!inputs"},
        ],
        tools=[TOOL],
        temperature=0.25,
        top_p=0.5,
        seed=7,
        stop=["x", "y"],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"50": -100},
        user="somebody",
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}},
        extra_body={"top_k": 5, "min_p": 0.1, "lora_name": "pirate"},
    )  # fmt: skip
    inputs = json.loads(answer.choices[0].message.content)
    assert json.loads(inputs["messages"]) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Bonn"}}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "!inputs"},
    ]  # fmt: skip
    assert json.loads(inputs["tools"]) == [TOOL]
    assert json.loads(inputs["sampling_parameters"]) == {
        "temperature": 0.25, "top_p": 0.5, "seed": 7, "stop": ["x", "y"], "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": {"50": -100}, "top_k": 5, "min_p": 0.1, "lora_name": "pirate",
        "structured_outputs": {"json": {"type": "object"}},
    }  # fmt: skip
    assert inputs["stream"] is False
    assert all(inputs[name] for name in ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens"))


def test_several_choices(client: Any) -> None:
    answer = client.chat.completions.create(**say("one two"), n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "one two"), (1, "twoone "), (2, "one two"),
    ]  # fmt: skip
    assert answer.usage.completion_tokens == 6


def test_log_probabilities_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(**say("né here"), logprobs=True, top_logprobs=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, bytes(first.bytes).decode()) == ("né ", -0.5, "né ")
    assert [(logprob.token, logprob.logprob) for logprob in first.top_logprobs] == [("t0", 0.0), ("t1", -1.0)]
    assert second.token == "here"
    answer = client.chat.completions.create(**say("hi"), logprobs=True)
    assert answer.choices[0].logprobs.content[0].top_logprobs == []
    assert client.chat.completions.create(**say("hi")).choices[0].logprobs is None


def test_chat_comes_in_pieces(client: Any) -> None:
    chunks = list(client.chat.completions.create(**say("one two"), stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "one ", "two", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_stream_ends_with_the_usage_where_it_is_wanted(client: Any) -> None:
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**say("one two"), stream=True, stream_options=options)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 2)
    assert all(chunk.usage is None for chunk in chunks)


def test_every_chunk_has_the_usage_so_far_where_it_is_wanted(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = client.chat.completions.create(**say("one two"), stream=True, stream_options=options)
    assert [chunk.usage.completion_tokens for chunk in asked] == [1, 1, 2, 2, 2]
    asked = client.completions.create(model="talker", prompt="a b c", stream=True, stream_options=options)
    assert [(chunk.usage.prompt_tokens, chunk.usage.total_tokens) for chunk in asked] == [
        (3, 4), (3, 5), (3, 6), (3, 6), (3, 6),
    ]  # fmt: skip


def test_choices_and_log_probabilities_in_pieces(client: Any) -> None:
    chunks = list(client.chat.completions.create(**say("one two"), stream=True, n=2, logprobs=True, top_logprobs=1))
    texts, tokens, ends = ["", ""], [[], []], ["", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += [one.token for one in choice.logprobs.content] if choice.logprobs else []
        ends[choice.index] += choice.finish_reason or ""
    assert texts == ["one two", "twoone "]
    assert tokens == [["one ", "two"], ["two", "one "]]
    assert ends == ["stop", "stop"]
