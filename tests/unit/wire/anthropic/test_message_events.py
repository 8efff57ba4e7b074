"""Thinking and calls in the Messages API: content blocks, their events, and the arguments that they carry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from conch.wire.anthropic.request import read_message_request
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.openai.response import ChoiceDelta, GenerationResponse
from conch.wire.output.formats import OutputFormat

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
THINKS = OutputFormat("hermes", ("<think>", "</think>")).dumps()
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TEXT = '<think>Hm.</think>Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def response(**members: Any) -> GenerationResponse:
    messages = [{"role": "user", "content": "a"}]
    chat = read_message_request(Fields({"max_tokens": 100, "messages": messages, "tools": [TOOL], **members}))
    return replace(chat.plan, output_format=THINKS).answer("m")


def whole(text: str, **members: Any) -> Message:
    message = response(**members)
    message.add(0, ChoiceDelta(text, finish="stop"), last=True)
    return Message.model_validate_json(message.body())


def test_thinking_and_calls_are_blocks() -> None:
    thinking, text, call = whole(TEXT).content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "Yes.")  # type: ignore[union-attr]
    assert (call.name, call.input) == ("f", {"a": 1})  # type: ignore[union-attr]


def test_stream_of_blocks_has_every_event_in_order() -> None:
    streamed = response(stream=True)
    data = b"".join([streamed.events(0, ChoiceDelta(character), last=False) for character in TEXT])
    data += streamed.events(0, ChoiceDelta(finish="stop"), last=True) + streamed.closing()
    found = [json.loads(block.partition(b"data: ")[2]) for block in data.split(b"\n\n") if block]
    valid = [EVENT.validate_python(event) for event in found if event["type"] != "ping"]
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in valid]
    assert [kind for index, kind in enumerate(kinds) if not index or kind != kinds[index - 1]] == [
        "message_start", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop", "content_block_start", "input_json_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    arguments = [
        event.delta.partial_json for event in valid if event.type == "content_block_delta" and event.index == 2
    ]
    assert json.loads("".join(arguments)) == {"a": 1}
    assert valid[-2].delta.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 9, "display": "omitted"}]
)
def test_thinking_is_left_out_if_the_client_says_so(thinking: dict[str, Any]) -> None:
    assert [block.type for block in whole(TEXT, thinking=thinking).content] == ["text", "tool_use"]


def test_message_without_text_has_an_empty_block() -> None:
    [block] = whole("").content
    assert (block.type, block.text) == ("text", "")  # type: ignore[union-attr]


def test_template_is_told_whether_to_think() -> None:
    def template(**members: Any) -> Any:
        fields = Fields({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **members})
        found = read_message_request(fields).template
        return found and json.loads(found)

    assert template() is None
    assert template(thinking={"type": "adaptive"}) is None
    assert template(thinking={"type": "disabled"}) == {"enable_thinking": False, "thinking": False}
    assert template(thinking={"type": "enabled", "budget_tokens": 2000}) == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a":' + "[" * 300 + "]" * 300 + "}", None),
        ('{"a":' + "[" * 2000 + "]" * 2000 + "}", None),
    ],
    ids=["large_number", "nested", "nested_deeper"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_arguments_of_any_size_are_given_as_they_are(arguments: str, expected: Any, streamed: bool) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    message = response(stream=streamed)
    if streamed:
        events = message.events(0, ChoiceDelta(text, finish="stop"), last=True) + message.closing()
        deltas = [
            json.loads(line[6:])["delta"] for line in events.decode().split("\n") if "input_json_delta" in line[:80]
        ]
        assert "".join(delta["partial_json"] for delta in deltas) == arguments
    else:
        message.add(0, ChoiceDelta(text, finish="stop"), last=True)
        [call] = json.loads(message.body())["content"]
        given = call["input"]
        assert (
            given == expected if expected else arguments in (json.dumps(given, separators=(",", ":")), *given.values())
        )


def messages(*turns: tuple[str, Any]) -> Any:
    sent = [{"role": role, "content": content} for role, content in turns]
    return json.loads(read_message_request(Fields({"max_tokens": 1, "messages": sent})).messages)


def test_consecutive_messages_of_a_role_are_combined() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
    assert messages(
        ("user", "a"), ("user", [{"type": "text", "text": "b"}]),
        ("assistant", [{"type": "thinking", "thinking": "Hm."}]), ("assistant", "c"), ("assistant", [call]),
        ("user", [result, result]), ("user", [{"type": "text", "text": "d"}]), ("user", "e"),
    ) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        ]},
        *[{"role": "tool", "tool_call_id": "1", "content": "3"}] * 2,
        {"role": "user", "content": "d\ne"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "!"}, "is not base64"),
        ({"type": "url", "url": "https://a/b.png"}, "this server does not fetch images"),
    ],
)
@pytest.mark.parametrize("in_result", [False, True])
def test_error_of_an_image_has_its_place_in_the_request(source: dict[str, str], expected: str, in_result: bool) -> None:
    block: dict[str, Any] = {"type": "image", "source": source}
    if in_result:
        block = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    # The messages of the user, which become one, follow a system message.
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [block]}]
    with pytest.raises(ApiError, match=expected) as caught:
        response(system="b", messages=messages)
    path = "messages[1].content[0].content[0].source" if in_result else "messages[1].content[0].source"
    assert caught.value.param == path and caught.value.message.startswith(f"'{path}' ")
