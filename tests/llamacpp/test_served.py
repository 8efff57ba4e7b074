"""A GGUF file on the engine ``llamacpp`` behind a server, with the real llama.cpp."""

from __future__ import annotations

import json
import operator
from base64 import b64encode
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

import openai

from conch.checkpoints.gguf import read_gguf
from conch.checkpoints.tokenizers.open import open_gguf
from tests.conformance.raw import Reply, Request, get, post, send
from tests.events import eventually
from tests.llamacpp.models import Alone, demo
from tests.llamacpp.projectors import write_llava
from tests.llamacpp.test_loading import changes, write_adapter
from tests.llamacpp.test_media import Helper, picture
from tests.llamacpp.test_retrieval import write_minilm, write_ranker
from tests.servers import ConchServer
from tests.unit.checkpoints.gguf_files import MEAN

pytestmark = pytest.mark.timeout(300)

PROMPT = "The capital of France is"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def config(**parameters: str) -> str:
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    return "\n".join(['backend: "huggingface"', *lines, "instance_group { kind: KIND_CPU }"])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    adapter = write_adapter(folder / "red.gguf", changes(demo()))
    cut = folder / "cut.gguf"
    cut.write_bytes(demo().read_bytes()[:50_000_000])
    minilm, _ = write_minilm(folder / "minilm.gguf", MEAN, "Q8_0")
    ranker, _ = write_ranker(folder / "ranker.gguf")
    seeing = folder / "seeing"
    seeing.mkdir()
    (seeing / "SmolLM2.gguf").symlink_to(demo())
    write_llava(seeing / "mmproj-SmolLM2.gguf", 576)
    models = {
        "minilm": {"model": str(minilm)},
        "ranker": {"model": str(ranker)},
        "smollm2": {"model": str(demo())},
        "adapted": {"model": str(demo()), "lora_modules": json.dumps({"red": str(adapter)}).replace('"', '\\"')},
        "cut": {"model": str(cut)},
        "layers": {"model": str(demo()), "n_gpu_layers": "4"},
        "elsewhere": {"model": str(demo()), "engine": "transformers", "n_gpu_layers": "4"},
        "sees": {"model": str(seeing)},
        "drafted": {"model": str(demo()), "speculative_method": "eagle"},
    }
    for name, parameters in models.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(config(**parameters))
    return folder / "models"


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with ConchServer(repository, "--model-control-mode=explicit", "--load-model=smollm2", log=log) as server:
        yield server


def load(server: ConchServer, name: str) -> Reply:
    return send(server.http, Request("POST", f"/v2/repository/models/{name}/load", {}), 120)


def generate(server: ConchServer, model: str = "smollm2", **fields: Any) -> Reply:
    if "sampling_parameters" in fields:
        fields["sampling_parameters"] = json.dumps(fields["sampling_parameters"])
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **fields}
    return send(server.http, Request("POST", f"/v2/models/{model}/generate", body), 120)


def test_llama_cpp_serves_gguf_files_where_it_is_installed(server: ConchServer) -> None:
    served = get(server.http, "/v2/models/smollm2/config").json()["parameters"]
    assert served["conch.engine"]["string_value"].startswith("llamacpp 0.")
    assert served["conch.precision"]["string_value"] == "Q4_1 (KV cache f16)"
    assert served["conch.gguf_check"]["string_value"].startswith("16 of 16 tokens agree")


def test_greedy_tokens_are_those_of_llama_cpp(server: ConchServer) -> None:
    tokenizer = open_gguf(read_gguf(demo()))
    wanted = Alone(demo()).greedy(tokenizer.encode(PROMPT), 16)
    reply = generate(server, max_tokens=16, return_token_ids=True, sampling_parameters={"ignore_eos": True}).json()
    assert reply["token_ids"] == wanted
    assert reply["text_output"] == tokenizer.decode(wanted)


def test_stream_adds_up_to_the_whole_response(server: ConchServer) -> None:
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 12}
    lines = post(server.http, "/v2/models/smollm2/generate_stream", body).body.decode().splitlines()
    pieces = [json.loads(line[6:])["text_output"] for line in lines if line.startswith("data: ")]
    assert len(pieces) > 1
    assert "".join(pieces) == generate(server, max_tokens=12).json()["text_output"]


def test_openai_client_gets_json_and_may_disconnect(server: ConchServer) -> None:
    client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Describe a person."}]
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=100, response_format=format, logprobs=True
    )
    assert reply.choices[0].finish_reason == "stop"
    person = json.loads(reply.choices[0].message.content or "")
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99
    assert reply.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def running() -> str:
        return get(server.metrics, "/metrics").body.decode().partition("vllm:num_requests_running{")[2].split()[1]

    eventually(lambda: float(running()) == 0, "the end of a stream whose client has gone")


def test_adapter_is_a_model_id_and_changes_the_text(server: ConchServer) -> None:
    assert load(server, "adapted").status == 200
    plain = generate(server, "adapted", max_tokens=12)
    adapted = generate(server, "adapted", max_tokens=12, sampling_parameters={"lora_name": "red"})
    assert plain.json()["text_output"] == generate(server, max_tokens=12).json()["text_output"]
    assert adapted.json()["text_output"] != plain.json()["text_output"]
    unknown = generate(server, "adapted", sampling_parameters={"lora_name": "blue"})
    assert unknown.status == 400 and "blue" in unknown.error


def test_chat_with_an_image_gives_the_text_of_libmtmd(server: ConchServer, repository: Path) -> None:
    assert load(server, "sees").status == 200
    image, buffer = picture(3), BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "text", "text": "Tell me"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {
        "model": "sees", "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
    }  # fmt: skip
    reply = post(server.http, "/v1/chat/completions", body).json()
    texts = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTell me",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    tokenizer = open_gguf(read_gguf(demo()))
    wanted = Helper(demo(), repository.parent / "seeing" / "mmproj-SmolLM2.gguf").greedy(texts, [image])
    assert "choices" in reply, reply
    assert reply["choices"][0]["message"]["content"] == tokenizer.decode(wanted)
    assert reply["usage"]["prompt_tokens"] == 16 + sum(len(tokenizer.encode(text)) for text in texts)
    unmarked = {**body, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "<__image__>"}]}]}
    refused = post(server.http, "/v1/chat/completions", unmarked)
    assert refused.status == 400 and "2 times '<__image__>', and the request 1" in str(refused.error)
    message = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}
    refused = post(server.http, "/v1/chat/completions", {**body, "messages": [message]})
    assert refused.status == 400 and "the model does not read 'audio': it reads 'image'" in str(refused.error)


def test_embedding_model_has_the_routes_of_embeddings(server: ConchServer) -> None:
    assert load(server, "minilm").status == 200
    served = get(server.http, "/v2/models/minilm/config").json()
    assert served["parameters"]["conch.engine"]["string_value"].startswith("llamacpp 0.")
    assert served["parameters"]["conch.precision"]["string_value"] == "Q8_0"
    assert served["parameters"]["conch.gguf_check"]["string_value"].startswith("the vectors of 24 tokens agree")
    texts = ["The library is open.", "The museum is open.", "Prime numbers"]
    client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)
    vectors = [item.embedding for item in client.embeddings.create(model="minilm", input=texts).data]
    assert [len(vector) for vector in vectors] == [384] * 3
    alike, unlike = (sum(map(operator.mul, vectors[0], vector)) for vector in vectors[1:])
    assert alike > 0.5 > unlike
    tensors = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": texts[:1]}
    reply = post(server.http, "/v2/models/minilm/infer", {"inputs": [tensors], "outputs": [{"name": "embedding"}]})
    assert reply.json()["outputs"][0]["data"] == pytest.approx(vectors[0], abs=1e-6)


def test_reranker_has_the_route_of_rerankers(server: ConchServer) -> None:
    assert load(server, "ranker").status == 200
    body = {"model": "ranker", "query": "the cat", "documents": ["a dog sleeps", "the cat sits", "the mat"]}
    results = post(server.http, "/v1/rerank", body).json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    refused = generate(server, "ranker")
    assert refused.status == 400


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "cut off"),
        ("layers", "n_gpu_layers is 4, but the instance runs on the CPU: set its kind to KIND_GPU"),
        ("elsewhere", "parameter 'n_gpu_layers' is for engine 'llamacpp', but the model runs on engine 'transformers'"),
        ("drafted", "parameter 'speculative_method' is 'eagle'; it must be one of draft_model, ngram"),
    ],
)
def test_model_that_cannot_be_served_does_not_load(server: ConchServer, name: str, message: str) -> None:
    reply = load(server, name)
    assert reply.status == 400
    assert message in reply.error
    assert generate(server, max_tokens=2).status == 200
