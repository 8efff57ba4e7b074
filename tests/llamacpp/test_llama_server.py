"""Chats with images get the greedy tokens that llama.cpp's own server gives.

make test-llamacpp ARGS="-m slow"       # compiles the server first: a quarter of an hour on two cores
"""

from __future__ import annotations

from base64 import b64encode
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

from benchmarks.peers import llama
from benchmarks.peers.servers import LlamaServer
from tests.conformance.raw import Request, send
from tests.llamacpp import projectors
from tests.llamacpp.models import demo
from tests.llamacpp.test_media import picture
from tests.llamacpp.test_served import config
from tests.servers import ConchServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NEW_TOKENS = 24


def image(*arguments: int) -> dict[str, Any]:
    buffer = BytesIO()
    picture(*arguments).save(buffer, "PNG")
    url = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [text("Tell me"), image(3)]}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [image(1), text("What is it?")]}],
    [{"role": "user", "content": [text("Compare "), image(1), text(" with "), image(2, 33, 90), text(" in a line.")]}],
    [{"role": "user", "content": [image(5, 200, 120), text("Write a story.")]}],
    [{"role": "user", "content": "What is the capital of France?"}],
]


def tokens(address: str, messages: list[dict[str, Any]]) -> tuple[list[str], str, int]:
    """Return the tokens of a greedy answer without that of its end, why it ended, and the prompt's length (tokens)."""
    body = {"model": "sees", "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True}
    reply = send(address, Request("POST", "/v1/chat/completions", body), 300).json()
    choice = reply["choices"][0]
    chosen = [token["token"] for token in choice["logprobs"]["content"]]
    # The servers give the end different texts.
    return (
        chosen[:-1] if choice["finish_reason"] == "stop" else chosen,
        choice["finish_reason"],
        reply["usage"]["prompt_tokens"],
    )


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_chats_with_images_get_the_tokens_of_llama_server(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "seeing"
    folder.mkdir()
    (folder / "SmolLM2.gguf").symlink_to(demo())
    projector = getattr(projectors, f"write_{kind}")(folder / "mmproj-SmolLM2.gguf", 576)
    with LlamaServer(llama.server(), demo(), slots=1, context=2048, projector=projector) as server:
        expected = [tokens(server.http, messages) for messages in CHATS]
    (tmp_path / "models" / "sees" / "1").mkdir(parents=True)
    (tmp_path / "models" / "sees" / "config.pbtxt").write_text(config(model=str(folder), threads="1"))
    with ConchServer(tmp_path / "models") as server:
        assert [tokens(server.http, messages) for messages in CHATS] == expected
    # The pictures matter: without them, the answers are others.
    assert len({tuple(chosen) for chosen, _, _ in expected}) == len(CHATS)
