"""Responses of models, and the objects and chunks that are made of them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor, pack_bytes
from conch.wire.openai.chat import ChatResponse, read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.reading import Fields
from conch.wire.openai.response import ChoiceDelta, Token, read_response
from conch.wire.output.formats import OutputFormat


def texts(name: str, *values: bytes) -> WireTensor:
    return WireTensor(name, "BYTES", (len(values),), pack_bytes(values))


def counts(name: str, *values: int) -> WireTensor:
    return WireTensor(name, "UINT32", (len(values),), struct.pack(f"<{len(values)}I", *values))


def answer(**members: Any) -> ChatResponse:
    return read_chat(Fields({"messages": [{"role": "user", "content": "a"}], **members})).plan.answer("m")


def chunks(events: bytes) -> list[Any]:
    return [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events.split(b"\n\n") if event]


def test_response_is_read_whatever_the_order_of_its_outputs() -> None:
    outputs = [
        counts("num_output_tokens", 1, 2),
        texts("finish_reason", b"None", b"length"),
        texts("text_output", "ä".encode(), b"\xffb"),
        counts("num_input_tokens", 5),
    ]
    reply = read_response(InferResponse(outputs))
    assert [(piece.text, piece.finish, piece.tokens) for piece in reply.pieces] == [
        ("ä", "", 1),
        ("\ufffdb", "length", 2),
    ]
    assert reply.prompt_tokens == 5


def test_log_probabilities_are_read_with_infinities() -> None:
    text = b'[{"5": {"logprob": -Infinity, "rank": 9, "decoded_token": "x"}, "1": {"logprob": -0.1}}]'
    (piece,) = read_response(InferResponse([texts("logprobs", text)]), 1).pieces
    assert piece.logprobs == [Token("x", -9999.0, [("token_id:1", -0.1)])]
    assert read_response(InferResponse([texts("logprobs", b"null")])).pieces[0].logprobs is None


def completed(model_response: list[WireTensor], **members: Any) -> list[dict[str, Any]]:
    """The choices of a completion of two prompts."""
    response = read_completion(Fields({"prompt": ["a", "b"], **members})).plan.answer("m")
    for index in range(2):
        for piece in read_response(InferResponse(model_response)).pieces:
            response.add(index, piece, last=True)
    choices: list[dict[str, Any]] = json.loads(response.body())["choices"]
    return choices


def test_choices_have_the_log_probabilities_of_the_prompt_if_requested() -> None:
    text = b'[null, {"5": {"logprob": -Infinity, "rank": 9, "decoded_token": "x"}}]'
    outputs = [texts("prompt_logprobs", text), texts("text_output", b"c")]
    expected = [None, {"5": {"logprob": -9999.0, "rank": 9, "decoded_token": "x"}}]
    assert [choice["prompt_logprobs"] for choice in completed(outputs, prompt_logprobs=0)] == [expected, expected]
    assert not any("prompt_logprobs" in choice for choice in completed(outputs))


def test_echo_has_the_log_probabilities_of_the_prompt() -> None:
    described = {"logprob": -0.5, "rank": 2, "decoded_token": "bc"}, {"logprob": -0.1, "rank": 1, "decoded_token": "d"}
    prompt = [None, {"5": described[0], "6": described[1]}]
    outputs = [
        texts("prompt_tokens", b"a", b"bc"),
        texts("prompt_logprobs", json.dumps(prompt).encode()),
        texts("logprobs", json.dumps([{"6": described[1]}]).encode()),
        texts("text_output", b"d"),
    ]
    choice, _ = completed(outputs, prompt=["abc", [7, 5]], echo=True, logprobs=1)
    assert choice["text"] == "abcd"
    assert choice["logprobs"] == {
        "tokens": ["a", "bc", "d"],
        "token_logprobs": [None, -0.5, -0.1],
        "top_logprobs": [None, {"d": -0.1, "bc": -0.5}, {"d": -0.1}],
        "text_offset": [0, 1, 3],
    }
    assert completed(outputs[2:], echo=True, logprobs=None)[0]["logprobs"] is None


@pytest.mark.parametrize("text", [b"{", b'[{"1": 2}]', b"[[1]]", b"7", b'[{"1": {}}]'])
def test_response_without_sense_is_the_models_failure(text: bytes) -> None:
    with pytest.raises(ConchError) as caught:
        read_response(InferResponse([texts("logprobs", text)]))
    assert caught.value.code is Code.INTERNAL


def test_choice_ends_with_its_reason() -> None:
    chat = answer()
    found = chunks(chat.events(0, ChoiceDelta("hi", "stop"), last=False))
    assert [(one["delta"], one["finish_reason"]) for one in found] == [
        ({"role": "assistant", "content": ""}, None), ({"content": "hi"}, "stop"),
    ]  # fmt: skip
    assert chat.ended(0)


def test_model_that_gives_no_reason_stopped_or_reached_the_limit() -> None:
    chat = answer(max_tokens=2, n=2)
    chat.add(0, ChoiceDelta("a", tokens=1), last=True)
    chat.add(1, ChoiceDelta("ab", tokens=2), last=True)
    assert [choice["finish_reason"] for choice in json.loads(chat.body())["choices"]] == ["stop", "length"]


def test_log_probabilities_wait_for_the_text_that_they_are_about() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = answer(tools=tools, logprobs=True)
    assert [
        chunk["logprobs"]
        for chunk in chunks(chat.events(0, ChoiceDelta("{", logprobs=[Token("{", -1, [])]), last=False))
    ] == [None]
    found = chunks(chat.events(0, ChoiceDelta("}", logprobs=[Token("}", -2, [])]), last=True))
    assert [token["token"] for token in found[-1]["logprobs"]["content"]] == ["{", "}"]
    assert found[-1]["delta"] == {"content": "{}"}


def test_part_of_a_character_has_its_bytes() -> None:
    half = {"logprob": -1, "decoded_token": "\ufffd", "bytes": [195]}
    text = json.dumps([{"5": half, "6": {"logprob": -2, "decoded_token": "a"}}]).encode()
    (piece,) = read_response(InferResponse([texts("logprobs", text)]), 1).pieces
    chat = answer(logprobs=True, top_logprobs=1)
    chat.add(0, ChoiceDelta("ä", logprobs=piece.logprobs), last=True)
    (token,) = json.loads(chat.body())["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("bytes:\\xc3", [195])
    assert token["top_logprobs"] == [{"token": "a", "logprob": -2.0, "bytes": [97]}]


def test_response_has_the_ids_of_its_tokens_and_the_name_of_its_request() -> None:
    outputs = [
        WireTensor("token_ids", "INT32", (3,), struct.pack("<3i", 7, 8, 9)),
        counts("num_output_tokens", 1, 2),
        texts("text_output", b"a", b"bc"),
    ]
    chat = answer(return_token_ids=True, request_id="mine", n=2)
    for index, piece in enumerate(read_response(InferResponse(outputs)).pieces):
        chat.add(index, piece, last=True)
    body = json.loads(chat.body())
    assert body["id"] == "chatcmpl-mine"
    assert [choice["token_ids"] for choice in body["choices"]] == [[7], [8, 9]]
    streamed = answer(return_token_ids=True)
    found = chunks(streamed.events(0, ChoiceDelta("a", token_ids=[7]), last=True))
    assert [chunk.get("token_ids") for chunk in found] == [None, [7]]


def test_stream_of_a_completion_has_the_ids_of_tokens_without_text() -> None:
    response = read_completion(Fields({"prompt": "a", "n": 2, "return_token_ids": True})).plan.answer("m")
    pieces = [
        ChoiceDelta(token_ids=[], prompt_ids=[5]), ChoiceDelta(token_ids=[7]), ChoiceDelta(token_ids=[]),
        ChoiceDelta("ä", token_ids=[8]),
    ]  # fmt: skip
    found = [chunk for piece in pieces for chunk in chunks(response.events(1, piece, last=False))]
    assert [chunk["text"] for chunk in found] == ["", "", "ä"]
    assert [chunk["token_ids"] for chunk in found] == [[], [7], [8]]
    assert [chunk.get("prompt_token_ids") for chunk in found] == [[5], None, None]


def test_reasoning_is_beside_the_content() -> None:
    plan = read_chat(Fields({"messages": [{"role": "user", "content": "a"}]})).plan
    plan = replace(plan, output_format=OutputFormat("hermes", ("<think>", "</think>")).dumps())
    chat = ChatResponse(plan, "m")
    chat.add(0, ChoiceDelta("<think>Well.</think>Yes.", "stop"), last=True)
    message = json.loads(chat.body())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Well.", "Yes.")
    streamed = ChatResponse(plan, "m")
    found = chunks(streamed.events(0, ChoiceDelta("<think>Well.</think>Yes.", "stop"), last=True))
    assert [chunk["delta"] for chunk in found[1:]] == [{"reasoning_content": "Well."}, {"content": "Yes."}]


def test_usage_has_the_cached_tokens_that_the_model_reports() -> None:
    reported = read_response(InferResponse([counts("num_cached_tokens", 3), counts("num_input_tokens", 5)]))
    chat = answer()
    chat.usage.add(reported.prompt_tokens, [ChoiceDelta("a", tokens=1)], reported.cached_tokens)
    chat.add(0, ChoiceDelta("a"), last=True)
    usage = json.loads(chat.body())["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (5, {"cached_tokens": 3})


def test_bytes_of_half_a_character_are_not_known() -> None:
    chat = answer(logprobs=True)
    chat.add(0, ChoiceDelta("ä", logprobs=[Token("\ufffd", -1, []), Token("ä", -1, [])]), last=True)
    content = json.loads(chat.body())["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [None, [195, 164]]
