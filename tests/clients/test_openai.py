"""OpenAI's client for Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.asking import ARGUMENTS, CALL, PLACE, WEATHER, Weather, recording, user


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.client("openai", "chat", "streaming")
def test_chat(client: Any) -> None:
    asked = {"model": "talker", "messages": [user("hello there")]}
    assert client.chat.completions.create(**asked).choices[0].message.content == "hello there"
    with client.chat.completions.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == "hello there"


@pytest.mark.client("openai", "completions")
def test_completions(client: Any) -> None:
    assert client.completions.create(model="talker", prompt="a text").choices[0].text == "a text"


@pytest.mark.client("openai", "responses", "streaming", "tools")
def test_responses(client: Any) -> None:
    assert client.responses.create(model="talker", input="hello there").output_text == "hello there"
    tool = {"type": "function", "name": "weather", "parameters": PLACE, "strict": False}
    with client.responses.stream(model="talker", input=CALL, tools=[tool]) as stream:
        (call,) = stream.get_final_response().output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(model="talker", input=[user(CALL), call, output], tools=[tool])
    assert (json.loads(call.arguments), more.output_text) == ({"place": "Bonn"}, "sunny")


@pytest.mark.client("openai", "tools", "streaming")
def test_tools(client: Any) -> None:
    asked = {"model": "talker", "messages": [user(CALL)], "tools": [WEATHER]}
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"place": "Bonn"})
    asked["messages"] = [user(CALL), message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == "sunny"


@pytest.mark.client("openai", "structured output")
def test_structured_output(client: Any) -> None:
    asked = {"model": "talker", "messages": [user(ARGUMENTS)]}
    message = client.chat.completions.parse(**asked, response_format=Weather).choices[0].message
    assert message.parsed == Weather(place="Bonn")
    response = client.responses.parse(model="talker", input=ARGUMENTS, text_format=Weather)
    assert response.output_parsed == Weather(place="Bonn")


@pytest.mark.client("openai", "embeddings", "models", "transcription")
def test_other_models(client: Any) -> None:
    assert [item.embedding[0] for item in client.embeddings.create(model="embedder", input=["a", "bc"]).data] == [1, 2]
    assert {"talker", "embedder", "listener"} <= {model.id for model in client.models.list()}
    heard = client.audio.transcriptions.create(model="listener", file=("a.wav", recording()))
    assert heard.text == "0.5 seconds"


@pytest.mark.client("openai", "errors")
def test_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[user("a")])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="talker", messages=[user("a")], extra_body={"max_token": 1})
    assert caught.value.param == "max_token"
    with pytest.raises(openai.APIError, match="the engine broke"):
        list(client.chat.completions.create(model="talker", messages=[user("!fail 2")], stream=True))
