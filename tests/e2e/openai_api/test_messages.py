"""Anthropic's Messages API with Anthropic's client: every object and event is valid as its model."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.e2e.openai_api.asking import TOOL
from tests.models import build
from tests.servers import ConchServer

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
FUNCTION: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]
WEATHER = {
    "name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],
}  # fmt: skip
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "%s"}}</tool_call>'


@pytest.fixture(scope="module")
def claude(server: ConchServer) -> Iterator[anthropic.Anthropic]:
    with connect(server) as client:
        yield client


def connect(server: ConchServer, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "any", "max_retries": 0, "timeout": 150, **options}
    return anthropic.Anthropic(base_url=f"http://{server.http}", **options)


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "talker", "max_tokens": 1000, "messages": [{"role": "user", "content": content}], **more}


def say(claude: Any, content: Any, **more: Any) -> Message:
    message = claude.messages.create(**asked(content, **more))
    return Message.model_validate(message.to_dict())


def stream(claude: Any, content: Any, **more: Any) -> list[Any]:
    events = claude.messages.create(**asked(content, **more), stream=True)
    return [EVENT.validate_python(event.to_dict()) for event in events]


def inputs(claude: Any, content: Any = "!inputs", **more: Any) -> Any:
    """What the model gets: its inputs."""
    [block] = claude.messages.create(**asked(content, **more)).content
    return json.loads(block.text)


def test_message_is_answered(claude: Any) -> None:
    message = say(claude, "hello there", system="Be kind.", metadata={"user_id": "a"})
    assert [block.text for block in message.content] == ["hello there"]
    assert (message.model, message.role, message.stop_reason) == ("talker", "assistant", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 2)
    assert message.id.startswith("msg_")


def test_stream_has_every_event_in_order(claude: Any) -> None:
    events = stream(claude, "hello there")
    assert [event.type for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0].message.usage.input_tokens == 2
    assert [event.delta.text for event in events[2:4]] == ["hello ", "there"]
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 2)


def test_stream_begins_with_a_ping_behind_the_message(server: ConchServer) -> None:
    _, _, body = post(server, {**asked("hello"), "stream": True})
    names = [line.removeprefix("event: ") for line in body.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"]


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_are_called_and_their_results_are_given_back(claude: Any, streaming: bool) -> None:
    text = f"!say Wait. {CALL % 'Bonn'}{CALL % 'Rome'}"
    if streaming:
        with claude.messages.stream(**asked(text, tools=[WEATHER])) as parts:
            message = parts.get_final_message()
    else:
        message = say(claude, text, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    assert message.content[0].text == "Wait."
    calls = message.content[1:]
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"place": "Bonn"}),
        ("weather", {"place": "Rome"}),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "rain"}],
         "is_error": True},
        {"type": "text", "text": "!inputs"},
    ]  # fmt: skip
    history = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                          *(block.to_dict() for block in message.content)]},
        {"role": "user", "content": results},
    ]  # fmt: skip
    seen = inputs(claude, tools=[WEATHER], messages=history)
    user, assistant, first, second, last = json.loads(seen["messages"])
    assert (user["content"], assistant["content"], assistant["reasoning_content"]) == (text, "Wait.", "Hm.")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"place": "Bonn"}, {"place": "Rome"}]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in (first, second)] == [
        ("tool", calls[0].id, "sunny"), ("tool", calls[1].id, "Error: rain"),
    ]  # fmt: skip
    assert (last["role"], last["content"]) == ("user", "!inputs")
    assert json.loads(seen["tools"]) == [TOOL]


@pytest.mark.parametrize(
    ("choice", "schema"),
    [
        ({"type": "any"}, {"type": "array"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"type": "array", "maxItems": 1}),
        ({"type": "tool", "name": "weather"}, {"type": "object"}),
    ],
)
def test_tool_choice_forces_a_call(claude: Any, choice: Any, schema: dict[str, Any]) -> None:
    message = claude.messages.create(**asked("!inputs", tools=[WEATHER], tool_choice=choice))
    block = message.content[0].to_dict()
    seen = block["input"] if block["type"] == "tool_use" else json.loads(block["text"])
    assert json.loads(seen["sampling_parameters"])["structured_outputs"]["json"].items() >= schema.items()


def test_tools_are_not_offered_if_none_may_be_called(claude: Any) -> None:
    assert "tools" not in inputs(claude, tools=[WEATHER], tool_choice={"type": "none"})
    assert "tools" in inputs(claude, tools=[WEATHER], tool_choice={"type": "auto"})


def test_sampling_is_passed_on(claude: Any) -> None:
    more = {"temperature": 0.5, "top_p": 0.5, "top_k": 3}
    seen = inputs(claude, stop_sequences=["END"], extra_body=more, max_tokens=700)
    assert json.loads(seen["sampling_parameters"]) == {**more, "max_tokens": 700, "stop": ["END"]}
    schema = {"type": "object", "properties": {}}
    seen = inputs(claude, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(seen["sampling_parameters"])["structured_outputs"] == {"json": schema}


def test_message_that_is_cut_says_so(claude: Any) -> None:
    message = say(claude, "one two three", max_tokens=2)
    assert (message.content[0].text, message.stop_reason) == ("one two ", "max_tokens")  # type: ignore[union-attr]


def test_tokens_are_counted(claude: Any) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    assert claude.messages.count_tokens(model="talker", messages=messages).input_tokens == 3


def test_system_and_texts_may_be_blocks(claude: Any) -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "!inputs"},
    ]
    seen = inputs(claude, "!inputs", system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Always."}])
    assert json.loads(seen["messages"])[0] == {"role": "system", "content": "Be kind.\nAlways."}
    assert say(claude, blocks).content[0].text == "a\n!inputs"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("status", "error", "asking"),
    [
        (400, "invalid_request_error", {"max_tokens": 0}),
        (400, "invalid_request_error", {"max_token": 1}),
        (404, "not_found_error", {"model": "nobody"}),
        (500, "api_error", {"messages": [{"role": "user", "content": "!fail 0"}]}),
    ],
)
def test_errors_have_the_form_of_the_api(server: ConchServer, status: int, error: str, asking: dict[str, Any]) -> None:
    given, headers, body = post(server, {**asked("hello"), **asking})
    document = json.loads(body)
    assert (given, document["type"], document["error"]["type"]) == (status, "error", error)
    assert headers["request-id"].startswith("req_")


def test_failure_in_a_stream_is_an_event(claude: Any) -> None:
    texts = []
    with pytest.raises(anthropic.APIStatusError, match="the engine broke") as caught:
        with claude.messages.stream(**asked("!fail 2")) as parts:
            texts.extend(parts.text_stream)
    assert texts == ["word ", "word "]
    assert caught.value.body["error"]["type"] == "api_error"


def test_request_has_the_id_of_the_client_or_a_new_one(claude: Any) -> None:
    given = claude.messages.with_raw_response.create(**asked("hello"), extra_headers={"X-Request-Id": "mine"})
    assert given.headers["request-id"] == "mine"
    new = claude.messages.with_raw_response.create(**asked("hello"))
    assert new.headers["request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"stop_sequence": ["a"]}, "did you mean 'stop_sequences'"),
        ({"temperature": 1.5}, "'temperature' is 1.5; it must be a number from 0 to 1"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].source.type'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'messages[0].content[0].type'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "send their results"),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "'tools[0].type'"),
        ({"tools": [{"name": "a"}]}, "'tools[0].input_schema'"),
        ({"tool_choice": {"type": "any"}}, "'tools' is missing"),
        ({"tool_choice": {"type": "all"}}, "'tool_choice.type'"),
        ({"thinking": {"type": "on"}}, "'thinking.type'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema'"),
        ({"container": "c"}, "'container' is not supported"),
        ({"speed": "fast"}, "'speed'"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server: ConchServer, members: dict[str, Any], words: str) -> None:
    status, _, body = post(server, {**asked("hello"), **members})
    assert status == 400
    assert words in json.loads(body)["error"]["message"]


def test_key_is_sent_as_anthropics_clients_do(tmp_path: Path) -> None:
    repository = build(tmp_path / "models", "talker", group="openai")
    flag = "--http-restricted-api=inference,metadata:authorization=Bearer secret"
    with ConchServer(repository, flag, env={"EVENTS": str(tmp_path)}) as server:
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with connect(server, **options) as client:
                assert say(client, "hello").content[0].text == "hello"  # type: ignore[union-attr]
        with connect(server, api_key="guess") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            say(client, "hello")
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert post(server, asked("hello"))[0] == 401


def post(server: ConchServer, body: Any) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v1/messages", json.dumps(body), {"anthropic-version": "2023-06-01"})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, dict(reply.getheaders()), text
