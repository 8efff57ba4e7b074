"""The tutorials' models without their model.py: a file that names the checkpoint is all there is in the repository."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.raw import post
from tests.servers import ConchServer
from tests.walkthroughs.conftest import Expected

MODELS = {
    "falcon7b": "tiiuae/falcon-7b",
    "persimmon8b": "adept/persimmon-8b-base",
    "llama2": "meta-llama/Llama-2-7b-hf",
    "qwen2": "Qwen/Qwen2-1.5B-Instruct",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("generation")
    for name, checkpoint in MODELS.items():
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps({"model": checkpoint, "dtype": "float32"}))
    with ConchServer(folder / "models", log=folder / "log", env=environment) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_texts_are_continued_as_transformers_does(server: ConchServer, expected: Expected, model: str) -> None:
    prompts = ["I am going", "How can you be", "Where is the nearest library, and how"]

    def ask(prompt: str) -> str:
        reply = post(server.http, f"/v2/models/{model}/generate", {"text_input": prompt, "max_tokens": 12})
        assert reply.status == 200, reply.body
        text: str = reply.json()["text_output"]
        return text

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(ask, prompts))
    assert texts == [expected(MODELS[model], prompt, "float32", max_new_tokens=12) for prompt in prompts]
