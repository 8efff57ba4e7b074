"""Anthropic's client for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.asking import ARGUMENTS, CALL, PLACE, Weather, user


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def asked(content: str) -> dict[str, Any]:
    return {"model": "talker", "max_tokens": 100, "messages": [user(content)]}


@pytest.mark.client("anthropic", "messages", "streaming", "token counts")
def test_messages(client: Any) -> None:
    assert client.messages.create(**asked("hello there")).content[0].text == "hello there"
    with client.messages.stream(**asked("hello there")) as stream:
        assert list(stream.text_stream) == ["hello ", "there"]
    counted = client.messages.count_tokens(model="talker", messages=[user("one two three")])
    assert counted.input_tokens == 3


@pytest.mark.client("anthropic", "tools", "streaming")
def test_tools(client: Any) -> None:
    tools = [{"name": "weather", "input_schema": PLACE}]
    with client.messages.stream(**asked(CALL), tools=tools) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert (message.stop_reason, call.name, call.input) == ("tool_use", "weather", {"place": "Bonn"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        user(CALL),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
    ]
    more = client.messages.create(**{**asked(""), "messages": messages}, tools=tools)
    assert more.content[0].text == "thanks"


@pytest.mark.client("anthropic", "structured output")
def test_structured_output(client: Any) -> None:
    message = client.messages.parse(**asked(ARGUMENTS), output_format=Weather)
    assert message.parsed_output == Weather(place="Bonn")


@pytest.mark.client("anthropic", "errors")
def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**asked("a"), "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="max_token"):
        client.messages.create(**asked("a"), extra_body={"max_token": 1})
    with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
        with client.messages.stream(**asked("!fail 2")) as stream:
            stream.get_final_message()
