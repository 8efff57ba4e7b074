"""The inference client of huggingface_hub."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.clients.asking import ARGUMENTS, CALL, PLACE, WEATHER, user


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(base_url=f"{url}/v1", api_key="any")


@pytest.mark.client("huggingface_hub", "chat", "streaming")
def test_chat(client: Any) -> None:
    asked = {"model": "talker", "messages": [user("hello there")]}
    assert client.chat_completion(**asked).choices[0].message.content == "hello there"
    chunks = client.chat_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello there"


@pytest.mark.client("huggingface_hub", "tools", "structured output")
def test_tools_and_structured_output(client: Any) -> None:
    (call,) = client.chat_completion([user(CALL)], model="talker", tools=[WEATHER]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"place": "Bonn"}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PLACE}}
    answer = client.chat_completion([user(ARGUMENTS)], model="talker", response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"place": "Bonn"}


@pytest.mark.client("huggingface_hub", "embeddings")
def test_embeddings(url: str) -> None:
    features = InferenceClient(f"{url}/v2/models/embedder/embed").feature_extraction("a")
    assert np.isclose(np.linalg.norm(features), 1)
    similarity = InferenceClient(f"{url}/similarity").sentence_similarity("a", ["a", "b"])
    assert similarity[0] == pytest.approx(1) and similarity[1] < 1


@pytest.mark.client("huggingface_hub", "errors")
def test_errors(client: Any) -> None:
    with pytest.raises(HfHubHTTPError, match="nobody"):
        client.chat_completion([user("a")], model="nobody")
