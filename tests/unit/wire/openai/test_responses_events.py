"""Reasoning in the Responses API: as its text or as its summary, in items and in events, and as input again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from conch.core.errors import ConchError
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.openai.response import ChoiceDelta, GenerationResponse
from conch.wire.openai.responses.items import chat_messages, join_entry, read_items
from conch.wire.openai.responses.request import read_responses
from conch.wire.output.formats import OutputFormat

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THINKS = OutputFormat("hermes", ("<think>", "</think>")).dumps()
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def response(**members: Any) -> GenerationResponse:
    fields = Fields({"input": "a", **members})
    previous, earlier, items = read_items(fields, lambda id: b"")
    chat = read_responses(fields, previous=previous, earlier=earlier, items=items)
    return replace(chat.plan, output_format=THINKS).answer("m")


def events(text: str, /, **members: Any) -> list[Any]:
    """The events of a stream of a text, a character at a time."""
    streamed = response(stream=True, **members)
    data = b"".join([streamed.events(0, ChoiceDelta(character, tokens=1), last=False) for character in text])
    data += streamed.events(0, ChoiceDelta(finish="stop"), last=True)
    streamed.usage.add(1, [ChoiceDelta(tokens=len(text))])
    data += streamed.closing()
    found = [block.partition(b"data: ")[2] for block in data.split(b"\n\n") if block]
    return [EVENT.validate_json(event) for event in found]


def names(found: list[Any]) -> list[str]:
    """The types of events; several deltas of one kind count as one."""
    types = [event.type.removeprefix("response.") for event in found]
    return [name for index, name in enumerate(types) if not index or name != types[index - 1]]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]),
        ({"reasoning": {"summary": "auto"}},
         ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
          "reasoning_summary_part.done"]),
    ],
)  # fmt: skip
def test_reasoning_is_an_item_before_the_answer(members: dict[str, Any], expected: list[str]) -> None:
    found = events(f"<think>Hm.</think>Yes.{CALL}", tools=[TOOL], **members)
    assert names(found) == [
        "created", "in_progress", "output_item.added", *expected, "output_item.done", "output_item.added",
        "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = found[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    parts = final.output[0].summary if members else final.output[0].content
    assert [part.text for part in parts] == ["Hm."]
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens


def test_whole_response_is_that_of_the_stream() -> None:
    text = f"<think>Hm.</think>Yes.{CALL}"
    whole = response(tools=[TOOL])
    whole.add(0, ChoiceDelta(text, finish="stop"), last=True)
    streamed = events(text, tools=[TOOL])[-1].response
    document = Response.model_validate_json(whole.body())

    def shown(final: Response) -> list[Any]:
        return [{**item.to_dict(), "id": "", "call_id": ""} for item in final.output]

    assert shown(document) == shown(streamed)


def test_output_is_input_again() -> None:
    whole = response(tools=[TOOL])
    whole.add(0, ChoiceDelta(f"<think>Hm.</think>Yes.{CALL}", finish="stop"), last=True)
    items = json.loads(whole.body())["output"]
    [message] = chat_messages(*read_items(Fields({"input": items}), lambda id: b"")[1:])
    assert (message["content"], message["reasoning_content"]) == ([{"type": "text", "text": "Yes."}], "Hm.")
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1}]


def test_failure_ends_the_stream_with_what_there_is() -> None:
    streamed = response(stream=True)
    data = streamed.events(0, ChoiceDelta("Yes."), last=False) + streamed.failure(500, ConchError("broken"))
    last = EVENT.validate_json(data.split(b"\n\n")[-2].partition(b"data: ")[2])
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.store is False


def test_last_reference_finds_the_items_of_earlier_ones() -> None:
    entries: dict[str, bytes] = {}
    lookups: list[str] = []

    def find_response(id: str) -> bytes:
        lookups.append(id)
        return entries[id]

    conversation: list[Any] = []
    for text in ("a", "b", "c"):
        conversation.append({"role": "user", "content": text})
        lookups.clear()
        _, _, items = read_items(Fields({"input": conversation}), find_response)
        final: Any = read_responses(Fields({}), previous=None, earlier=[], items=items).plan.answer("m")
        final.add(0, ChoiceDelta(text, finish="stop"), last=True)
        entries[final.id] = final.entry()
        conversation.append({"type": "item_reference", "id": json.loads(final.body())["output"][0]["id"]})
    assert len(items) == 5
    assert len(lookups) == 1


def test_references_to_many_responses_are_refused() -> None:
    def find_response(id: str) -> bytes:
        output = [{"type": "reasoning", "id": f"rs_{id[5:]}0", "summary": [], "content": []}]
        return join_entry(json.dumps({"output": output}).encode(), b"[]")

    references = [{"type": "item_reference", "id": f"rs_{number:032x}0"} for number in range(30)]
    assert len(read_items(Fields({"input": references[:20]}), find_response)[2]) == 20
    with pytest.raises(ConchError, match="more than 20 responses"):
        read_items(Fields({"input": references}), find_response)


def test_turns_become_messages() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    messages = chat_messages(*read_items(Fields({"input": items}), lambda id: b"")[1:])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert messages[1]["reasoning_content"] == "x"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["1", "2"]
    assert messages[4]["reasoning_content"] == "y"


def test_functions_in_namespaces_are_called_by_their_own_names() -> None:
    tools = [TOOL, {"type": "namespace", "name": "agents", "description": "a", "tools": [{**TOOL, "name": "g"}]}]
    call = CALL.replace('"f"', '"g"')
    found = events(call + CALL, tools=tools)
    for item in (found[-1].response.output[0], next(event.item for event in found if "item.done" in event.type)):
        assert (item.name, item.namespace) == ("g", "agents")
    assert found[-1].response.output[1].namespace is None
    with pytest.raises(ConchError, match="two functions called 'f'"):
        response(tools=[*tools, {"type": "namespace", "name": "other", "tools": [TOOL]}])
    with pytest.raises(ConchError, match=r"'tools\[0\].tools\[0\].type'"):
        response(tools=[{"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "g"}]}])


def test_forced_call_has_no_content_for_a_format() -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "string"}}}
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}
    (call,) = events('{"a": 1}', text=form, **forced)[-1].response.output
    assert (call.name, call.arguments) == ("f", '{"a":1}')
    with pytest.raises(ConchError, match="'tool_choice' cannot be combined with 'structured_outputs'"):
        response(**forced, structured_outputs={"regex": "a"})


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"type": "input_image", "image_url": "x"}, "image_url"),
        ({"type": "input_image", "image_url": "data:image/png;base64,YQ==", "detail": "x"}, "detail"),
        ({"type": "input_audio", "input_audio": {"data": "!"}}, "input_audio.data"),
    ],
)
def test_error_of_a_file_has_its_place_in_the_request(part: dict[str, Any], path: str) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]
    with pytest.raises(ApiError) as caught:
        response(instructions="b", input=items)
    assert caught.value.param == f"input[1].content[0].{path}"
    assert caught.value.message.startswith(f"'{caught.value.param}' is ")


def test_error_shows_names_of_the_client_as_they_are() -> None:
    with pytest.raises(ApiError, match="'tool_choice' names 'messages', which is not among 'tools'"):
        response(tools=[TOOL], tool_choice={"type": "function", "name": "messages"})
