"""What is refused, and how clients hear of it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e.openai_api.asking import post, say
from tests.servers import ConchServer


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (say("hi", temperature="hot"), "temperature"),
        (say("hi", temperature=3), "temperature"),
        (say("hi", n=10**9), "n"),
        (say("hi", n=True), "n"),
        (say("hi", max_tokens=0), "max_tokens"),
        (say("hi", top_logprobs=2), "top_logprobs"),
        (say("hi", stream_options={"include_usage": True}), "stream_options"),
        (say("hi", stop=[""]), "stop"),
        (say("hi", logit_bias={"a": 1}), "logit_bias"),
        (say("hi", response_format={"type": "xml"}), "response_format.type"),
        (say("hi", functions=[{}]), "functions"),
        (say("hi", unheard_of=1), "unheard_of"),
        (say("hi", tool_choice="required"), "tool_choice"),
        (say("hi", tools=[{"type": "function"}]), "tools[0].function"),
        (say([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].image_url.url"),
        (say(None), "messages[0].content"),
        ({"model": "talker", "messages": []}, "messages"),
        ({"model": "talker", "messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"model": "talker", "messages": "hi"}, "messages"),
        ({"messages": []}, "model"),
        (say("hi", model=3), "model"),
        (say("hi", model="separate"), "model"),
        (say("hi", model="embedder"), "model"),
        (b'{"model": ', None),
        (b'{"model": "\xff"}', None),
        (b"[]", None),
        (b"[" * 200 + b"]" * 200, None),
        (b'{"a":' * 200 + b"1" + b"}" * 200, None),
    ],
)
def test_chat_is_refused_with_the_member_that_is_wrong(server: ConchServer, body: Any, param: str | None) -> None:
    status, _, reply = post(server, "/v1/chat/completions", body)
    error = reply["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"model": "talker"}, "prompt"),
        ("completions", {"model": "talker", "prompt": ""}, "prompt"),
        ("completions", {"model": "talker", "prompt": [1, 2]}, "prompt"),
        ("completions", {"model": "talker", "prompt": ["a"] * 3000}, "prompt"),
        ("completions", {"model": "talker", "prompt": ["a"] * 1000, "n": 64}, "n"),
        ("completions", {"model": "talker", "prompt": ["a", [1]]}, "prompt"),
        ("completions", {"model": "talker", "prompt": ["a", []]}, "prompt[1]"),
        ("completions", {"model": "talker", "prompt": [1, -2]}, "prompt"),
        ("completions", {"model": "talker", "prompt": [[1], [True]]}, "prompt[1]"),
        ("completions", {"model": "talker", "prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("completions", {"model": "talker", "prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"model": "talker", "prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"model": "talker", "prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("completions", {"model": "separate", "prompt": "a", "logprobs": 1}, "logprobs"),
        ("completions", {"model": "separate", "prompt": "a", "n": 2}, "n"),
        ("completions", {"model": "embedder", "prompt": "a"}, "model"),
        ("embeddings", {"model": "embedder", "input": []}, "input"),
        ("embeddings", {"model": "embedder", "input": [[1, 2]]}, "input"),
        ("embeddings", {"model": "embedder", "input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("embeddings", {"model": "embedder", "input": "a", "dimensions": 5}, "dimensions"),
        ("embeddings", {"model": "embedder", "input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"model": "talker", "input": "a"}, "model"),
    ],
)
def test_completion_or_embedding_is_refused(server: ConchServer, path: str, body: Any, param: str) -> None:
    status, _, reply = post(server, f"/v1/{path}", body)
    assert (status, reply["error"]["param"]) == (400, param)


def test_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_unknown_path_and_method_are_reported_in_openais_form(server: ConchServer) -> None:
    assert post(server, "/v1/audio/speech", {})[::2] == (
        404, {"error": {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}},
    )  # fmt: skip
    assert post(server, "/v1/models", {})[0] == 405
