"""The tutorial "Deploying Hugging Face Transformer Models in Triton", request by request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.servers import ConchServer
from tests.walkthroughs.conftest import Expected, copy_models, curl

#: The model, its checkpoint, and how many tokens its configuration allows.
MODELS = {
    "falcon7b": ("tiiuae/falcon-7b", 15),
    "persimmon8b": ("adept/persimmon-8b-base", 20),
    "llama7b": ("meta-llama/Llama-2-7b-hf", 15),
}

# Each worker imports transformers for itself; tests/examples has models that do the same.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("hugging-face")
    with ConchServer(copy_models(folder / "models", *MODELS), log=folder / "log", env=environment) as server:
        yield server


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[ConchServer]:
    """falcon7b with the two lines that switch batching on, and the same model.py."""
    folder = tmp_path_factory.mktemp("batching")
    repository = copy_models(folder / "models", "falcon7b")
    with (repository / "falcon7b" / "config.pbtxt").open("a") as config:
        config.write("dynamic_batching { }\nmax_batch_size: 8\n")
    with ConchServer(repository, log=folder / "log", env=environment) as server:
        yield server


def test_a_prompt_is_continued(server: ConchServer, expected: Expected) -> None:
    """Step 4."""
    body, _ = curl(
        server,
        "curl -X POST localhost:8000/v2/models/falcon7b/infer -d "
        """'{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}]}'""",
    )
    text = expected("tiiuae/falcon-7b", "I am going", "float16", max_length=15)
    assert json.loads(body) == {
        "model_name": "falcon7b",
        "model_version": "1",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}],
    }


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("falcon7b", "How can you be"), ("persimmon8b", "Where is the nearest"), ("llama7b", "How can you be")],
)
def test_one_server_hosts_several_models(server: ConchServer, expected: Expected, model: str, prompt: str) -> None:
    """Step 5; Llama 2 is the tutorial's third model."""
    body, _ = curl(
        server,
        f"curl -X POST localhost:8000/v2/models/{model}/infer -d "
        f"""'{{"inputs": [{{"name":"text_input","datatype":"BYTES","shape":[1],"data":["{prompt}"]}}]}}'""",
    )
    name, length = MODELS[model]
    assert json.loads(body)["outputs"][0]["data"] == [expected(name, prompt, "float16", max_length=length)]


def test_generate_endpoint(server: ConchServer, expected: Expected) -> None:
    body, _ = curl(
        server, """curl -X POST localhost:8000/v2/models/falcon7b/generate -d '{"text_input":"How can you be"}'"""
    )
    text = expected("tiiuae/falcon-7b", "How can you be", "float16", max_length=15)
    assert json.loads(body) == {"model_name": "falcon7b", "model_version": "1", "text_output": text}


def test_what_the_model_logs_and_prints_is_in_the_log(server: ConchServer) -> None:
    assert server.log is not None
    text = server.log.read_text()
    assert "Loading HuggingFace model: tiiuae/falcon-7b..." in text
    assert "Loading HuggingFace model: adept/persimmon-8b-base..." in text
    assert "Max sequence length: 20" in text


def test_batching_is_switched_on_by_two_lines(batching: ConchServer, expected: Expected) -> None:
    prompts = [f"{start} {end}" for start in ("I am", "How can", "Where is") for end in ("you", "the", "nearest", "on")]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: infer(batching, [prompt]), prompts))

    for prompt, (answer,) in zip(prompts, answers, strict=True):
        # The limit counts the padding of a shorter prompt of the batch too.
        assert answer.startswith(prompt)
        assert expected("tiiuae/falcon-7b", prompt, "float16", max_length=15).startswith(answer)
    with urlopen(f"http://{batching.http}/v2/models/falcon7b/stats") as response:
        statistics = json.loads(response.read())["model_stats"][0]
    assert statistics["inference_count"] >= len(prompts)
    assert statistics["execution_count"] < statistics["inference_count"]
    assert max(entry["batch_size"] for entry in statistics["batch_stats"]) > 1


def test_a_request_may_bring_a_batch(batching: ConchServer) -> None:
    prompts = ["I am going", "Where is the station", "How can you"]
    answers = infer(batching, prompts)
    assert len(answers) == 3
    assert all(answer.startswith(prompt) for answer, prompt in zip(answers, prompts, strict=True))


def infer(server: ConchServer, prompts: list[str]) -> list[str]:
    tensor: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [len(prompts), 1], "data": prompts}
    request = Request(f"http://{server.http}/v2/models/falcon7b/infer", json.dumps({"inputs": [tensor]}).encode())
    with urlopen(request, timeout=60) as response:
        texts: list[str] = json.loads(response.read())["outputs"][0]["data"]
    return texts
