"""The clients for Node; each script prints the results of its steps."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.clients.record import HERE

NODE = HERE / "node"


def results(script: str, url: str) -> dict[str, Any]:
    run = subprocess.run(["node", NODE / script, url], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.client("openai for Node", "chat", "completions", "responses", "streaming", "tools", "structured output")
@pytest.mark.client("openai for Node", "embeddings", "transcription", "models", "errors")
def test_openai(url: str) -> None:
    assert results("openai.mjs", url) == {
        "chat": "hello there",
        "streaming": ["hello ", "there"],
        "tools": "sunny in Bonn",
        "streamed tools": '{"place":"Bonn"}',
        "structured output": "Bonn",
        "completions": "a ",
        "responses": "hello there",
        "streamed responses": [["function_call", "weather", '{"place":"Bonn"}']],
        "embeddings": [1, 2],
        "transcription": "0.1 seconds",
        "models": ["embedder", "listener", "ranker", "talker"],
        "errors": ["NotFoundError", 404, "BadRequestError", "max_token"],
    }


@pytest.mark.client("anthropic for Node", "messages", "streaming", "tools", "structured output", "token counts")
@pytest.mark.client("anthropic for Node", "errors")
def test_anthropic(url: str) -> None:
    assert results("anthropic.mjs", url) == {
        "chat": "hello there",
        "streaming": ["hello ", "there"],
        "tools": ["tool_use", {"place": "Bonn"}, "thanks"],
        "streamed tools": {"place": "Bonn"},
        "structured output": "Bonn",
        "token counts": 3,
        "errors": ["NotFoundError", 404, "api_error"],
    }


@pytest.mark.client("Vercel AI SDK", "chat", "responses", "messages", "streaming", "tools", "structured output")
@pytest.mark.client("Vercel AI SDK", "embeddings", "errors")
def test_ai_sdk(url: str) -> None:
    providers = ("compatible", "chat", "responses", "anthropic")
    assert results("ai_sdk.mjs", url) == {
        "chat": dict.fromkeys(providers, "hello there"),
        "streaming": {name: ["hello ", "there"] for name in providers},
        "tools": {name: ["sunny in Bonn"] for name in providers},
        "structured output": dict.fromkeys(providers, "Bonn"),
        "embeddings": [1, 2],
        "errors": [True, 404, "model_not_found"],
    }


@pytest.mark.client("Hugging Face for Node", "chat", "streaming", "tools", "structured output", "embeddings", "errors")
def test_hugging_face(url: str) -> None:
    answers = results("huggingface.mjs", url)
    ((first, *_),) = answers.pop("embeddings")
    assert 0 < first < 1
    assert answers == {
        "chat": "hello there",
        "streaming": ["hello ", "there"],
        "tools": {"name": "weather", "arguments": '{"place":"Bonn"}'},
        "structured output": '{"place": "Bonn"}',
        "errors": ["ProviderApiError", 404],
    }
