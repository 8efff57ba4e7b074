"""The Responses API with OpenAI's client: every object and event is valid as its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.e2e.openai_api.asking import TOOL, post
from tests.models import build
from tests.oracle.run import free_ports
from tests.redis_server import RedisServer
from tests.servers import ConchServer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "%s"}}</tool_call>'


def respond(client: Any, **members: Any) -> Response:
    response = client.responses.create(model="talker", **members)
    return Response.model_validate(response.to_dict())


def stream(client: Any, **members: Any) -> list[Any]:
    """The events, numbered from 0."""
    events = [
        EVENT.validate_python(event.to_dict())
        for event in client.responses.create(model="talker", stream=True, **members)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def inputs(client: Any, **members: Any) -> Any:
    """What the model gets: its inputs."""
    return json.loads(respond(client, **{"input": "!inputs", **members}).output_text)


def test_text_is_answered(client: Any) -> None:
    response = respond(client, input="hello there", metadata={"a": "b"}, instructions="be kind", temperature=0.5)
    assert (response.status, response.output_text, response.model) == ("completed", "hello there", "talker")
    assert (response.metadata, response.instructions, response.temperature) == ({"a": "b"}, "be kind", 0.5)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 2, 4)


def test_response_has_an_id_and_its_duration(client: Any) -> None:
    headers = client.responses.with_raw_response.create(model="talker", input="a").headers
    assert headers["x-request-id"].startswith("req_")
    assert headers["openai-processing-ms"].isdigit()


def test_stream_has_every_event_in_order(client: Any) -> None:
    events = stream(client, input="hello there")
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.delta for event in events[4:6]] == ["hello ", "there"]
    final = events[-1].response
    assert (final.output_text, final.usage.output_tokens, events[0].response.status) == (
        "hello there",
        2,
        "in_progress",
    )
    assert {event.item_id for event in events[3:8]} == {final.output[0].id}


def test_tools_are_called_and_their_results_are_given_back(client: Any) -> None:
    text = f"!say Wait. {CALL % 'Bonn'}{CALL % 'Rome'}"
    response = respond(client, input=text, tools=[WEATHER])
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert [json.loads(call.arguments) for call in response.output[1:]] == [{"place": "Bonn"}, {"place": "Rome"}]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in response.output[1:]
    ]
    again = [{"role": "user", "content": text}, *response.to_dict()["output"], *results]
    seen = inputs(client, input=[*again, {"role": "user", "content": "!inputs"}], tools=[WEATHER])
    user, assistant, *tools, _ = json.loads(seen["messages"])
    assert (user["content"], assistant["content"]) == (text, "Wait.")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"place": "Bonn"}, {"place": "Rome"}]
    assert [(message["role"], message["content"]) for message in tools] == [("tool", "sunny")] * 2
    assert [message["tool_call_id"] for message in tools] == [call["id"] for call in assistant["tool_calls"]]
    assert json.loads(seen["tools"]) == [TOOL]


def test_stream_of_calls_has_every_event_in_order(client: Any) -> None:
    events = stream(client, input=f"!say Wait. {CALL % 'Bonn'}{CALL % 'Rome'}", tools=[WEATHER])
    names = [event.type.removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert [name for name in names if not name.endswith("delta")] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    for index in (1, 2):
        parts = [e.delta for e in events if e.type.endswith("arguments.delta") and e.output_index == index]
        [done] = [e for e in events if e.type.endswith("arguments.done") and e.output_index == index]
        assert ("".join(parts), done.name) == (done.arguments, "weather")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", {"type": "array"}),
        ({"type": "function", "name": "weather"}, {"type": "object"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
         {"type": "array"}),
    ],
)  # fmt: skip
def test_tool_choice_forces_a_call(client: Any, choice: Any, expected: dict[str, Any]) -> None:
    other = {**WEATHER, "name": "other"}
    asked = {"model": "talker", "input": "!inputs", "tools": [WEATHER, other], "tool_choice": choice}
    text = client.responses.create(**asked).to_json()
    schema = json.loads(json.loads(_text_of(text))["sampling_parameters"])["structured_outputs"]["json"]
    assert schema["type"] == expected["type"]
    if type(choice) is dict and choice["type"] == "allowed_tools":
        assert list(schema["$defs"]) == ["weather"]


def _text_of(response: str) -> str:
    """The text that a model wrote, be it a call or not."""
    item = json.loads(response)["output"][0]
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def test_response_continues_another_one(client: Any) -> None:
    first = respond(client, input="one", instructions="Not for the next.")
    second = respond(client, input=[{"role": "user", "content": "two"}], previous_response_id=first.id)
    seen = inputs(client, previous_response_id=second.id, instructions="Be kind.")
    assert [(message["role"], message["content"]) for message in json.loads(seen["messages"])] == [
        ("system", "Be kind."), ("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"),
        ("user", "!inputs"),
    ]  # fmt: skip


def test_stored_response_is_returned_and_removed(client: Any) -> None:
    first = client.responses.create(model="talker", input="one")
    assert first.store is True
    final = stream(client, input="two", previous_response_id=first.id)[-1].response
    assert Response.model_validate(client.responses.retrieve(final.id).to_dict()) == final
    items = client.responses.input_items.list(final.id)
    listed = [item.to_dict() for item in items.data]
    ResponseItemList.model_validate({"object": "list", "data": listed, **_ids(items)})
    assert [item["content"][0]["text"] for item in listed] == ["two", "one", "one"]
    client.responses.delete(final.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(final.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, input="three", previous_response_id=final.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert respond(client, input="three", previous_response_id=first.id).output_text == "three"


def test_input_items_are_listed_in_pages(client: Any) -> None:
    messages = [{"role": "user", "content": f"text {number}"} for number in range(23)]
    id = respond(client, input=messages).id
    written = [message["content"] for message in messages]

    def listed(**query: Any) -> Any:
        return client.responses.input_items.list(id, **query)

    def texts(items: Any) -> list[str]:
        return [item.content[0].text for item in items]

    first = listed()
    assert (texts(first.data), first.has_more) == (written[:2:-1], True)
    assert texts(first) == written[::-1]  # the client reads all pages
    assert texts(listed(order="asc", limit=10)) == written
    page = listed(order="asc", limit=2, after=first.data[-1].id)
    assert (texts(page.data), page.has_more) == (written[4:6], True)
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[1].id)
    [oldest] = listed(order="asc", limit=1).data
    end = listed(after=oldest.id)
    assert (end.data, end.has_more) == ([], False)
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_0"}):
        with pytest.raises(openai.BadRequestError) as caught:
            listed(**query)
        assert caught.value.param == next(iter(query))


def _ids(items: Any) -> dict[str, Any]:
    return {"first_id": items.first_id, "last_id": items.last_id, "has_more": items.has_more}


def test_input_refers_to_items_of_stored_responses(client: Any) -> None:
    conversation: list[Any] = []
    for text in ("one", "two"):
        conversation.append({"role": "user", "content": text})
        response = respond(client, input=conversation)
        conversation.append({"type": "item_reference", "id": response.output[0].id})
    seen = inputs(client, input=[*conversation, {"role": "user", "content": "!inputs"}])
    assert [(message["role"], message["content"]) for message in json.loads(seen["messages"])] == [
        ("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"), ("user", "!inputs"),
    ]  # fmt: skip


@pytest.mark.parametrize("members", [{"store": False}, {"input": "word " * 300_000}], ids=["not_wanted", "too_large"])
def test_response_says_that_it_is_not_stored(client: Any, members: dict[str, Any]) -> None:
    response = client.responses.create(model="talker", **{"input": "one", "max_output_tokens": 1, **members})
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_large_input_is_continued(client: Any) -> None:
    first = respond(client, input="word " * 100_000, max_output_tokens=1)
    assert first.output_text == "word "
    assert first.usage is not None
    seen = inputs(client, previous_response_id=first.id)
    assert len(json.loads(seen["messages"])[0]["content"]) == 500_000


def test_text_has_the_format_of_the_request(client: Any) -> None:
    class Person(BaseModel):
        name: str

    parsed = client.responses.parse(model="talker", input='!say {"name": "Ada"}', text_format=Person)
    assert parsed.output_parsed == Person(name="Ada")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    named = {"type": "json_schema", "name": "a", "schema": schema}
    for text_format, expected in ((named, schema), ({"type": "json_object"}, {"type": "object"})):
        seen = json.loads(inputs(client, text={"format": text_format})["sampling_parameters"])
        assert seen["structured_outputs"]["json"].items() >= expected.items()
    assert inputs(client, text={"format": {"type": "text"}, "verbosity": "medium"})["sampling_parameters"] == "{}"


def test_sampling_is_passed_on(client: Any) -> None:
    seen = inputs(client, max_output_tokens=7, temperature=0, top_p=0.5, extra_body={"top_k": 3})
    expected = {"max_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3}
    assert json.loads(seen["sampling_parameters"]) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_response_that_is_cut_is_incomplete(client: Any, streaming: bool) -> None:
    asked = {"input": "one two three", "max_output_tokens": 2}
    if streaming:
        *_, end = stream(client, **asked)
        assert end.type == "response.incomplete"
        response = end.response
    else:
        response = respond(client, **asked)
    assert (response.status, response.output_text) == ("incomplete", "one two ")
    assert (response.incomplete_details.reason, response.output[0].status) == ("max_output_tokens", "incomplete")


@pytest.mark.parametrize("streaming", [False, True])
def test_log_probabilities_are_included(client: Any, streaming: bool) -> None:
    asked = {"input": "one two", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = stream(client, **asked)[-1].response if streaming else respond(client, **asked)
    logprobs = response.output[0].content[0].logprobs
    assert [(token.token, token.logprob, len(token.top_logprobs)) for token in logprobs] == [
        ("one ", -0.5, 1), ("two", -0.5, 1),
    ]  # fmt: skip
    assert respond(client, input="one").output[0].content[0].logprobs == []  # type: ignore[union-attr]


def test_failure_of_the_model_is_an_error_or_the_last_event(client: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        respond(client, input="!fail 0")
    events = stream(client, input="!fail 2")
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "the engine broke")
    assert [event.delta for event in events if event.type.endswith("delta")] == ["word ", "word "]


@pytest.mark.parametrize(
    ("members", "param", "words"),
    [
        ({"max_output_token": 3}, "max_output_token", "did you mean 'max_output_tokens'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "'max_output_tokens' is 0"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"truncation": "auto"}, "truncation", "send fewer items"),
        ({"truncation": "middle"}, "truncation", "auto or disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"web_search"'),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters", "a JSON schema"),
        ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice.type", "mcp"),
        ({"tool_choice": "required"}, "tool_choice", "'tools' is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "a JSON schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"text": {"formt": 1}}, "text.formt", "did you mean 'text.format'"),
        ({"include": ["file_search_call.results"]}, "include[0]", "file_search_call.results"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "no store"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 33}"}]}, "input[0].id", "not found"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "robot"),
        ({"input": []}, "input", "at least one"),
        ({"input": None}, "input", "missing"),
        ({"metadata": {"a": 1}}, "metadata", "texts"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "concise"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: ConchServer, members: dict[str, Any], param: str, words: str
) -> None:
    status, _, reply = post(server, "/v1/responses", {"model": "talker", "input": "a", **members})
    assert (status, reply["error"]["param"]) == (400, param)
    assert words in reply["error"]["message"]


def test_responses_are_stored_in_the_redis_of_the_response_cache(tmp_path: Path) -> None:
    (redis_port,) = free_ports(1)
    redis = RedisServer(redis_port)
    repository = build(tmp_path / "models", "talker", group="openai")
    flags = ["--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={redis_port}"]
    try:
        with ConchServer(repository, *flags, env={"EVENTS": str(tmp_path)}) as server, _client(server) as client:
            first = respond(client, input="one")
            second = respond(client, input="two", previous_response_id=first.id)
        # Another server continues it.
        with ConchServer(repository, *flags, env={"EVENTS": str(tmp_path)}) as server, _client(server) as client:
            refers = {"type": "item_reference", "id": second.output[0].id}
            assert respond(client, input=[refers, {"role": "user", "content": "three"}]).output_text == "three"
            seen = inputs(client, previous_response_id=second.id)
            assert [message["content"] for message in json.loads(seen["messages"])[::2]] == ["one", "two", "!inputs"]
            client.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(second.id)
            assert client.responses.retrieve(first.id).output_text == "one"
    finally:
        redis.stop()


def _client(server: ConchServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0, timeout=60)
