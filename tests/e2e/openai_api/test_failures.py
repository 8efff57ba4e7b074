"""Models that fail, clients that go, and who may ask at all."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.openai_api.asking import post, say
from tests.events import Events
from tests.models import build
from tests.servers import ConchServer


def test_failure_of_the_model_is_the_answer(client: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        client.chat.completions.create(**say("!fail 0"))
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        client.chat.completions.create(**say("!fail 0"), stream=True)


def test_failure_in_the_middle_of_a_stream_is_an_event(client: Any) -> None:
    pieces = []
    with pytest.raises(openai.APIError, match="the engine broke"):
        pieces.extend(
            chunk.choices[0].delta.content for chunk in client.chat.completions.create(**say("!fail 2"), stream=True)
        )
    assert pieces == ["", "word ", "word "]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_client_that_goes_cancels_its_request(server: ConchServer, waiting: Events, path: str) -> None:
    name = path.replace("/", "-")
    asked = {
        "chat/completions": say(f"!wait {name}"),
        "completions": {"model": "talker", "prompt": ["hi", f"!wait {name}"]},
        "responses": {"model": "talker", "input": f"!wait {name}"},
        "messages": {**say(f"!wait {name}"), "max_tokens": 9},
    }[path]
    body = json.dumps({**asked, "stream": True}).encode()
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/%b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
        waiting.wait(f"{name}.started")
    waiting.wait(f"{name}-cancelled.started")


def test_failure_with_one_prompt_ends_the_others(server: ConchServer, waiting: Events) -> None:
    status, _, reply = post(server, "/v1/completions", {"model": "talker", "prompt": ["!wait other", "!fail 0"]})
    assert (status, reply["error"]["type"]) == (500, "server_error")
    waiting.wait("other-cancelled.started")


def test_large_body_is_answered(client: Any) -> None:
    text = "word " * 300_000
    answer = client.chat.completions.create(**say(text), max_tokens=1)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == ("word ", 300_000)


def test_port_of_its_own_has_nothing_else(server: ConchServer) -> None:
    address: str = server.openai  # type: ignore[attr-defined]
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client:
        assert client.chat.completions.create(**say("hi")).choices[0].message.content == "hi"
    connection = http.client.HTTPConnection(address, timeout=60)
    for path, status in (("/health/ready", 200), ("/v2", 404), ("/v2/repository/index", 404)):
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == status, path
    connection.close()


def test_restricted_apis_need_the_key(tmp_path: Path) -> None:
    repository = build(tmp_path / "models", "talker", group="openai")
    flag = "--http-restricted-api=inference,metadata:authorization=Bearer secret"
    with ConchServer(repository, flag, env={"EVENTS": str(tmp_path)}) as server:
        base = f"http://{server.http}/v1"
        with openai.OpenAI(base_url=base, api_key="secret", max_retries=0) as client:
            assert client.chat.completions.create(**say("hi")).choices[0].message.content == "hi"
        with openai.OpenAI(base_url=base, api_key="guess", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="restricted"):
                client.chat.completions.create(**say("hi"))
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    repository = build(tmp_path / "models", "embedder", group="openai")
    with ConchServer(repository, "--max-pending-requests=1", log=tmp_path / "log") as server:
        status, headers, reply = post(server, "/v1/embeddings", {"model": "embedder", "input": ["a"] * 100})
        assert (status, headers["Retry-After"], reply["error"]["type"]) == (503, "1", "server_error")
        status, _, reply = post(server, "/v1/embeddings", {"model": "embedder", "input": ["a"] * 4})
        assert (status, len(reply["data"])) == (200, 4)
