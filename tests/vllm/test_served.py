"""The backend ``vllm`` on the real vLLM, on a CPU: ``make test-vllm``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.checkpoints import train_tokenizer, write_adapter, write_checkpoint
from tests.conformance.raw import Reply, Request, get, post, send
from tests.e2e.processes import alive, workers
from tests.events import eventually
from tests.servers import ConchServer

pytestmark = pytest.mark.timeout(600)

#: vLLM is imported and loads a model within this time on a busy machine (s).
LOAD_SECONDS = 300
PROMPTS = ("The station", "Where is the nearest library?", "I am going to the market in the")


def config(name: str) -> str:
    return f'name: "{name}" backend: "vllm" instance_group [ {{ count: 1 kind: KIND_MODEL }} ]'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(every_byte=True)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    sizes = {"hidden_size": 128, "intermediate_size": 64, "max_position_embeddings": 256}
    write_checkpoint(folder, LlamaConfig, sizes, tokenizer, seed=5)
    return folder


@pytest.fixture(scope="module")
def repository(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``llama`` as in Triton's examples, and models with arguments that are refused."""
    folder = tmp_path_factory.mktemp("repository")
    models = {
        "llama": {"max_num_seqs": 8},
        "broken": {"tensor_parallel_size": 3},
        "misspelt": {"enforce_eagre": True},
        "unscaled": {"rope_theta": 1e6},
        "adapted": {"enable_lora": True},
    }
    for name, arguments in models.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config(name))
        given = {"model": str(checkpoint), "dtype": "float32", "enforce_eager": True, "disable_log_requests": True}
        given |= {"disable_log_stats": True, "swap_space": 4}
        (version / "model.json").write_text(json.dumps(given | arguments))
    adapter = folder / "adapted" / "1" / "red"
    write_adapter(checkpoint, adapter, seed=1)
    (adapter.parent / "multi_lora.json").write_text(json.dumps({"red": str(adapter)}))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with ConchServer(repository, "--model-control-mode=explicit", log=log, env=environment) as server:
        assert load(server, "llama").status == 200
        yield server


def load(server: ConchServer, name: str) -> Reply:
    return send(server.http, Request("POST", f"/v2/repository/models/{name}/load", {}), LOAD_SECONDS)


def generate(server: ConchServer, **fields: Any) -> Reply:
    if "sampling_parameters" in fields:
        fields["sampling_parameters"] = json.dumps(fields["sampling_parameters"])
    request = Request("POST", "/v2/models/llama/generate", {"text_input": PROMPTS[0], **fields})
    return send(server.http, request, LOAD_SECONDS)


def structured(**structure: Any) -> dict[str, Any]:
    return {"sampling_parameters": {"temperature": 0, "max_tokens": 32, "structured_outputs": structure}}


def metric(server: ConchServer, name: str) -> float:
    lines = get(server.metrics, "/metrics").body.decode().splitlines()
    [line] = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    assert 'model="llama"' in line and 'model_name="llama"' in line
    return float(line.rpartition(" ")[2])


def test_vllm_serves_the_model_on_a_cpu(server: ConchServer) -> None:
    served = get(server.http, "/v2/models/llama/config").json()["parameters"]
    assert served["conch.engine"]["string_value"].startswith("vllm ")
    assert "conch.instead_of" not in served
    check = served["conch.transformers_check"]["string_value"]
    assert check.startswith("16 of 16 tokens agree, log-probabilities differ by 0.0000 on average")


def test_greedy_tokens_are_those_of_transformers(server: ConchServer, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        reply = generate(
            server,
            text_input=prompt,
            return_logprobs=True,
            return_num_input_tokens=True,
            sampling_parameters={"temperature": 0, "max_tokens": 24, "logprobs": 2},
        ).json()
        positions = json.loads(reply["logprobs"])
        tokens = [int(next(iter(position))) for position in positions]
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert reply["num_input_tokens"] == ids.shape[1]
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=24, do_sample=False)[0]
            logprobs = model(made[None]).logits[0].log_softmax(-1)
        assert tokens == made[ids.shape[1] :].tolist()
        for index, (token, position) in enumerate(zip(tokens, positions, strict=True), ids.shape[1] - 1):
            assert len(position) == 2
            assert position[str(token)]["logprob"] == pytest.approx(logprobs[index, token].item(), abs=1e-3)
        assert reply["text_output"].startswith(prompt)


def test_request_may_exclude_the_prompt_from_the_output(server: ConchServer) -> None:
    parameters = {"temperature": 0, "stream": False}
    whole = generate(server, parameters=parameters).json()["text_output"]
    inside = generate(server, parameters={**parameters, "exclude_input_in_output": True}).json()["text_output"]
    outside = generate(server, parameters=parameters, exclude_input_in_output=True).json()["text_output"]
    assert whole == PROMPTS[0] + inside
    assert inside == outside


def test_stream_adds_up_to_the_whole_response(server: ConchServer) -> None:
    fields = {"text_input": PROMPTS[0], "parameters": {"temperature": 0, "max_tokens": 8, "stream": True}}
    body = post(server.http, "/v2/models/llama/generate_stream", fields).body.decode()
    pieces = [json.loads(line[6:])["text_output"] for line in body.splitlines() if line.startswith("data: ")]
    whole = generate(server, parameters={"temperature": 0, "max_tokens": 8}, exclude_input_in_output=True)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.json()["text_output"]


def test_openai_client_gets_a_response_and_may_disconnect(server: ConchServer) -> None:
    client = openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Where is the station?"}]
    reply = client.chat.completions.create(model="llama", messages=messages, temperature=0, max_tokens=8)
    chunks = client.chat.completions.create(model="llama", messages=messages, temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.choices[0].message.content
    endless = {"min_tokens": 150}
    stream = client.chat.completions.create(
        model="llama", messages=messages, max_tokens=150, stream=True, extra_body=endless
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: metric(server, "num_requests_running") == 0, "the end of a stream whose client has gone")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": "the " * 300}, "the prompt has "),
        ({"text_input": ""}, "'text_input' is empty"),
        ({"parameters": {"max_tokens": 1000}}, "the prompt has "),
        ({"parameters": {"temperature": -1}}, "sampling parameter 'temperature' is -1"),
        ({"parameters": {"temperature": 50}}, "temperature must be in [0, 2], got 50"),
        ({"sampling_parameters": {"no_such": 1}}, "sampling parameter 'no_such' is not known"),
        (structured(json={"type": "nonsense"}), "Grammar error: "),
        (structured(json={"patternProperties": {"[a": {}}}), "structured_outputs: this json does not compile: "),
        (structured(regex="(?=a)b"), "Grammar error: "),
        (structured(regex="[a"), "Grammar error: "),
        (structured(grammar="root ::= ("), "Invalid grammar specification: "),
    ],
)
def test_invalid_request_is_refused_in_one_sentence(server: ConchServer, fields: dict[str, Any], message: str) -> None:
    reply = generate(server, **fields)
    assert (reply.status, reply.error[: 25 + len(message)]) == (400, f"Error generating stream: {message}")
    assert "(parameter=" not in reply.error
    assert generate(server, parameters={"temperature": 0}).status == 200


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("stop_token_ids", [10**6]),
        ("guided_regex", "(?=a)b"),
        ("structured_outputs", {"json": {"type": "nonsense"}}),
        ("max_completion_tokens", 1000),
    ],
)
def test_openai_error_names_the_member_that_vllm_refuses(server: ConchServer, member: str, value: Any) -> None:
    reply = post(server.http, "/v1/completions", {"model": "llama", "prompt": "a", member: value})
    assert (reply.status, reply.json()["error"]["param"]) == (400, member)


def test_output_fits_its_structure_after_requests_with_other_structures(server: ConchServer) -> None:
    structures: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"json": {"type": "boolean"}}, lambda text: json.loads(text) in (True, False)),
        (
            {"json": {"type": "integer", "multipleOf": 7, "minimum": 10000, "maximum": 99999}},
            lambda text: json.loads(text) % 7 == 0,
        ),
        ({"choice": ["red", "blue"]}, lambda text: text in ("red", "blue")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    )
    for structure, fits in structures:
        reply = generate(server, **structured(**structure), exclude_input_in_output=True)
        assert reply.status == 200, reply.error
        assert fits(reply.json()["text_output"]), (structure, reply.json()["text_output"])


def test_adapter_is_a_model_of_the_openai_api(server: ConchServer) -> None:
    assert load(server, "adapted").status == 200
    listed = {model["id"]: model.get("parent") for model in get(server.http, "/v1/models").json()["data"]}
    assert listed == {"llama": None, "adapted": None, "red": "adapted"}
    texts = []
    for model in ("adapted", "red"):
        body = {"model": model, "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        reply = send(server.http, Request("POST", "/v1/completions", body), LOAD_SECONDS).json()
        assert reply["model"] == model
        texts.append(reply["choices"][0]["text"])
    named = {"text_input": PROMPTS[1], "exclude_input_in_output": True, "parameters": {
        "lora_name": "red", "temperature": 0, "max_tokens": 8, "ignore_eos": True,
    }}  # fmt: skip
    assert post(server.http, "/v2/models/adapted/generate", named).json()["text_output"] == texts[1] != texts[0]
    post(server.http, "/v2/repository/models/adapted/unload", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "must be divisible by tensor parallel size (3)"),
        ("misspelt", "'enforce_eagre' is not known; did you mean 'enforce_eager'?"),
        ("unscaled", "no longer has the engine argument 'rope_theta'; its successor is 'hf_overrides'"),
    ],
)
def test_load_fails_with_an_argument_that_is_refused(server: ConchServer, name: str, message: str) -> None:
    reply = load(server, name)
    assert reply.status == 400
    assert message in reply.error
    assert "pydantic" not in reply.error


def test_argument_that_vllm_no_longer_has_is_ignored_with_a_warning(server: ConchServer) -> None:
    warning = r"model 'llama': vllm \S+ no longer has the engine argument 'swap_space': it is ignored"
    assert re.search(warning, server.log.read_text())


def test_prefix_metrics_do_not_depend_on_vllms_log(server: ConchServer) -> None:
    before = metric(server, "prefix_cache_hits_total")
    for _ in range(2):
        assert generate(server, text_input="the " * 200, parameters={"temperature": 0}).status == 200
    assert metric(server, "prefix_cache_hits_total") > before
    assert metric(server, "prefix_cache_queries_total") > 0


def test_killed_engine_is_restarted(server: ConchServer) -> None:
    [worker] = workers(server)
    worker.kill()
    eventually(lambda: get(server.http, "/v2/models/llama/ready").status != 200, "noticing the death")
    eventually(lambda: get(server.http, "/v2/models/llama/ready").status == 200, "starting again", LOAD_SECONDS)
    assert generate(server, parameters={"temperature": 0}).status == 200


def test_unloading_ends_the_processes_of_vllm(server: ConchServer) -> None:
    processes = [process for worker in workers(server) for process in (worker, *worker.children(recursive=True))]
    post(server.http, "/v2/repository/models/llama/unload", {})
    eventually(lambda: not any(map(alive, processes)), "the end of vLLM's processes", 30)
    assert load(server, "llama").status == 200
    assert generate(server, parameters={"temperature": 0}).status == 200
