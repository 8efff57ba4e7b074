"""LoRA adapters as models of the OpenAI API, of models that are loaded on demand one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.checkpoints import train_tokenizer, write_adapter, write_checkpoint
from tests.conformance.raw import Request, get, send
from tests.e2e.openai_api.asking import post
from tests.servers import ConchServer

pytest.importorskip("peft")

#: The adapters of each model; ``shared`` belongs to both, and ``other`` is also the name of a model.
ADAPTERS = {"llama": ("red", "blue", "shared", "other"), "other": ("shared",)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("adapters")
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    for name, adapters in ADAPTERS.items():
        version = folder / "models" / name / "1"
        write_checkpoint(version, LlamaConfig, {"intermediate_size": 64}, tokenizer, seed=len(name))
        for seed, adapter in enumerate(adapters):
            write_adapter(version, version / adapter, seed)
        parameters = {"lora_modules": {adapter: adapter for adapter in adapters}, "lora_folders": [str(version)]}
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(json.dumps(value))} }} }}'
            for key, value in parameters.items()
        ]
        (folder / "models" / name / "config.pbtxt").write_text(" ".join(['backend: "huggingface"', *lines]))
    options = ("--model-control-mode=on-demand", "--max-loaded-models=1", "--min-loaded-secs=0")
    with ConchServer(folder / "models", *options, log=folder / "log") as server:
        yield server


def complete(server: ConchServer, model: str, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "How can you be", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    status, _, reply = post(server, "/v1/completions", body)
    return status, reply


def test_adapters_are_models_once_their_model_has_been_loaded(server: ConchServer) -> None:
    assert complete(server, "red")[0] == 404
    texts = {}
    for adapter in ("", "red", "blue"):
        status, reply = complete(server, "llama", lora_name=adapter)
        assert (status, reply.get("model")) == (200, "llama"), reply
        texts[adapter] = reply["choices"][0]["text"]
    assert len(set(texts.values())) == 3
    listed = {model["id"]: model.get("parent") for model in get(server.http, "/v1/models").json()["data"]}
    assert listed == {
        "llama": None, "other": None, "red": "llama", "blue": "llama", "shared": "llama", "llama:other": "llama"
    }  # fmt: skip
    assert get(server.http, "/v1/models/red").json()["parent"] == "llama"

    # The adapter's model is loaded again after its eviction, and names that are ambiguous are no models.
    assert complete(server, "other")[1]["model"] == "other"
    for adapter in ("red", "blue"):
        status, reply = complete(server, adapter)
        assert (status, reply["model"], reply["choices"][0]["text"]) == (200, adapter, texts[adapter])
    for adapter in ("llama:red", "llama:other", "llama:shared", "other:shared"):
        status, reply = complete(server, adapter)
        assert (status, reply.get("model")) == (200, adapter), reply
        model, name = adapter.split(":")
        assert reply["choices"] == complete(server, model, lora_name=name)[1]["choices"]
        assert get(server.http, f"/v1/models/{adapter}").json()["parent"] == model
    status, reply = complete(server, "shared")
    assert (status, reply["error"]["param"]) == (400, "model")
    assert reply["error"]["message"].endswith("use 'llama:shared' or 'other:shared'")
    assert get(server.http, "/v1/models/shared").status == 400
    assert complete(server, "llama:absent")[0] == complete(server, "other:red")[0] == 404
    assert "conch.adapters" in get(server.http, "/v2/models/llama/config").json()["parameters"]


def test_adapter_is_a_model_of_every_route(server: ConchServer) -> None:
    def chat(model: str, **more: Any) -> Any:
        return reply_to("/v1/chat/completions", model, max_tokens=8, **messages, **more)["choices"][0]["message"]

    def reply_to(path: str, model: str, **members: Any) -> Any:
        status, _, reply = post(server, path, {"model": model, "temperature": 0, **members})
        assert (status, reply.get("model")) == (200, model), reply
        return reply

    words = "How can you be"
    messages = {"messages": [{"role": "user", "content": words}]}
    texts = {name: chat("llama", lora_name=name)["content"] for name in ("", "red", "blue")}
    assert len(set(texts.values())) == 3
    for model, adapter in (("red", "red"), ("llama:blue", "blue")):
        assert chat(model)["content"] == texts[adapter]
        response = reply_to("/v1/responses", model, input=words, max_output_tokens=8)
        assert response["output"][0]["content"][0]["text"] == texts[adapter]
        message = reply_to("/v1/messages", model, max_tokens=8, **messages)
        assert message["content"][0]["text"] == texts[adapter]


def test_adapter_that_contradicts_the_model_is_refused(server: ConchServer) -> None:
    complete(server, "llama")
    assert complete(server, "red", lora_name="red")[0] == 200
    status, reply = complete(server, "red", lora_name="blue")
    assert (status, reply["error"]["param"]) == (400, "lora_name")


def test_adapter_is_loaded_with_its_model_and_gone_after_its_eviction(server: ConchServer) -> None:
    def load(name: str, **more: Any) -> int:
        body = {"lora_name": name, "lora_path": "red", **more}
        return send(server.http, Request("POST", "/v1/load_lora_adapter", body)).status

    assert complete(server, "other")[0] == 200  # evicts the model
    assert load("late", base_model_name="absent") == 404
    assert load("late", base_model_name="llama") == 200
    status, reply = complete(server, "late")
    assert (status, reply["choices"]) == (200, complete(server, "red")[1]["choices"])
    assert complete(server, "other")[0] == 200
    assert get(server.http, "/v1/models/late").status == complete(server, "late")[0] == 404
    assert get(server.http, "/v1/models/red").json()["parent"] == "llama"
