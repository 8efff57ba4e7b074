"""Language models served as they are: requests join and leave a running batch, stream, and end exactly once."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import requests
import torch
import tritonclient.grpc as grpcclient
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.conformance.raw import Reply, get, post, tensor
from tests.e2e.processes import workers
from tests.events import eventually
from tests.servers import ConchServer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
WORDS = [
    "I",
    "am",
    "going",
    "to",
    "the",
    "market",
    "in",
    "the",
    "morning",
    "how",
    "can",
    "you",
    "be",
    "sure",
    "that",
    "the",
    "station",
    "is",
    "open",
]
Background = Callable[..., Future[Any]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny Llama: ``llama`` as it is, ``whole`` without streams, ``narrow`` of four sequences, ``vllm``."""
    folder = tmp_path_factory.mktemp("repository")
    tokenizer = train_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sizes = {"intermediate_size": 64, "max_position_embeddings": 512}
    write_checkpoint(folder / "llama" / "1", LlamaConfig, sizes, tokenizer, seed=5)
    for name in ("whole", "narrow"):
        shutil.copytree(folder / "llama" / "1", folder / name / "1")
    (folder / "whole" / "config.pbtxt").write_text("model_transaction_policy { decoupled: false }")
    (folder / "narrow" / "config.pbtxt").write_text(
        'backend: "huggingface"\n'
        'parameters { key: "max_num_seqs" value { string_value: "4" } }\n'
        'parameters { key: "kv_cache_tokens" value { string_value: "256" } }\n'
        "dynamic_batching { default_queue_policy { max_queue_size: 8 } }\n"
    )
    vllm = folder / "vllm" / "1"
    vllm.mkdir(parents=True)
    (vllm / "model.json").write_text(
        json.dumps({"model": str(folder / "llama" / "1"), "gpu_memory_utilization": 0.5, "max_model_len": 128})
    )
    (folder / "vllm" / "config.pbtxt").write_text('backend: "vllm" instance_group { count: 1 kind: KIND_MODEL }')
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with ConchServer(repository, "--model-control-mode=explicit", "--load-model=*", log=log) as server:
        yield server


@pytest.fixture(scope="module")
def expected(repository: Path) -> Callable[[str, int], list[int]]:
    """What ``transformers.generate`` makes of a text, greedily."""
    folder = repository / "llama" / "1"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(text: str, count: int) -> list[int]:
        given = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**given, do_sample=False, max_new_tokens=count, pad_token_id=0)
        tokens: list[int] = made[0, given["input_ids"].shape[1] :].tolist()
        return tokens

    return generate


def generate(server: ConchServer, model: str = "llama", **body: Any) -> Reply:
    return post(server.http, f"/v2/models/{model}/generate", body)


def stream(server: ConchServer, model: str = "llama", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    reply = post(server.http, f"/v2/models/{model}/generate_stream", {"stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.body
    return [json.loads(event.removeprefix("data: ")) for event in reply.body.decode().split("\n\n") if event]


def statistics(server: ConchServer, model: str = "llama") -> dict[str, Any]:
    found: dict[str, Any] = get(server.http, f"/v2/models/{model}/stats").json()["model_stats"][0]
    return found


def idle(server: ConchServer, model: str = "llama") -> bool:
    now = statistics(server, model)["generation"]
    return bool(now["running"] == now["waiting"] == now["kv_cache_tokens"] == 0)


def prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Texts of one to thirty words, and how many tokens are to follow each."""
    chance = random.Random(seed)
    return [(" ".join(chance.choices(WORDS, k=chance.randint(1, 30))), chance.randint(1, 40)) for _ in range(count)]


def test_each_of_several_texts_gets_an_answer(server: ConchServer) -> None:
    texts = ["I am going", "the station is open", "how can you"]
    wanted = [generate(server, text_input=text, max_tokens=6).json()["text_output"] for text in texts]
    for model in ("llama", "whole"):
        assert generate(server, model, text_input=texts, max_tokens=6).json()["text_output"] == wanted
    assert generate(server, text_input=texts[:1], max_tokens=6).json()["text_output"] == wanted[:1]


def test_text_that_is_refused_refuses_its_neighbours(server: ConchServer) -> None:
    reply = generate(server, text_input=["I am", "", "the"], max_tokens=400)
    assert (reply.status, reply.error) == (400, "'text_input' is empty: there is nothing to continue")
    assert generate(server, text_input="I am", max_tokens=4).status == 200
    eventually(lambda: idle(server), "leaving the batch")


def test_more_texts_than_may_wait_are_refused(server: ConchServer) -> None:
    reply = generate(server, "narrow", text_input=["I am going"] * 40, max_tokens=20)
    assert reply.status == 503, reply.body
    assert generate(server, "narrow", text_input="I am", max_tokens=4).status == 200
    eventually(lambda: idle(server, "narrow"), "leaving the batch")


def test_misspelt_sampling_parameter_is_refused(server: ConchServer) -> None:
    refusal = "parameter 'temprature' is not known to model 'llama'; did you mean 'temperature'?"
    for body in ({"temprature": 0}, {"parameters": {"temprature": 0}}):
        reply = generate(server, text_input="I am", **body)
        assert (reply.status, reply.error) == (400, refusal)
    reply = generate(server, text_input="I am", parameters={"logits_processors": "a"})
    assert (reply.status, reply.error) == (400, "sampling parameter 'logits_processors' is not supported")


def test_log_probabilities_of_the_prompt_are_refused_by_an_engine_without_them(server: ConchServer) -> None:
    reply = generate(server, text_input="I am", sampling_parameters='{"prompt_logprobs": 2}')
    assert (reply.status, reply.error) == (
        501,
        "engine 'transformers' does not have log-probabilities of the prompt; llamacpp, openvino and vllm do",
    )


def test_what_a_client_sees_of_a_text_model(server: ConchServer) -> None:
    config = get(server.http, "/v2/models/llama/config").json()
    assert config["backend"] == "huggingface"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"]["task"] == {"string_value": "text-generation"}
    assert {"text_input", "max_tokens", "sampling_parameters"} <= {one["name"] for one in config["input"]}


def test_greedy_text_is_that_of_transformers_in_a_busy_batch(
    server: ConchServer, expected: Callable[[str, int], list[int]], background: Background
) -> None:
    asked = prompts(48, seed=1)
    answers = [
        background(generate, server, text_input=text, max_tokens=count, return_token_ids=True) for text, count in asked
    ]
    leaving = [leave(server, text, after=1) for text, _ in prompts(6, seed=2)]
    for (text, count), answer in zip(asked, answers, strict=True):
        tokens = answer.result().json()["token_ids"]
        assert (tokens if isinstance(tokens, list) else [tokens]) == expected(text, count)
    assert len(leaving) == 6


def leave(server: ConchServer, text: str, *, after: int, model: str = "llama") -> None:
    """Request a stream and disconnect after some of its events."""
    body = json.dumps({"text_input": text, "stream": True, "max_tokens": 300, "parameters": {"ignore_eos": True}})
    host, port = server.http.split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("POST", f"/v2/models/{model}/generate_stream", body)
        response = connection.getresponse()
        for _ in range(2 * after):
            response.readline()


def test_tokens_of_texts_and_chats_are_those_of_transformers(server: ConchServer, repository: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(repository / "llama" / "1")
    tokens = post(
        server.http, "/tokenize", {"model": "llama", "prompt": "How can you?", "return_token_strs": True}
    ).json()
    assert tokens["tokens"] == tokenizer("How can you?")["input_ids"]
    assert tokens["token_strs"] == tokenizer.convert_ids_to_tokens(tokens["tokens"])
    messages = [{"role": "user", "content": "How?"}]
    for start in (True, False):
        body = {"model": "llama", "messages": messages, "add_generation_prompt": start}
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=start, return_dict=False)
        assert post(server.http, "/tokenize", body).json()["tokens"] == expected
    decoded = post(server.http, "/detokenize", {"model": "llama", "tokens": tokens["tokens"]}).json()
    assert decoded["prompt"] == tokenizer.decode(tokens["tokens"])
    other = post(server.http, "/tokenize", {"model": "vllm", "prompt": "How can you?"}).json()
    assert (other["tokens"], other["max_model_len"]) == (tokens["tokens"], 128)
    # An output on request is not among those of a request that names none.
    body = {"inputs": [tensor("text_input", "BYTES", ["How"], [1])]}
    reply = post(server.http, "/v2/models/whole/infer", body)
    assert [output["name"] for output in reply.json()["outputs"]] == ["text_output"]
    assert generate(server, "vllm", text_input="How").status == 200


def test_a_stream_adds_up_to_the_whole_text(server: ConchServer) -> None:
    body = {"text_input": "How can you be", "max_tokens": 20, "parameters": {"ignore_eos": True}}
    whole = generate(server, exclude_input_in_output=True, **body).json()["text_output"]
    events = stream(server, return_num_output_tokens=True, return_finish_reason=True, **body)
    assert "".join(event["text_output"] for event in events) == whole
    assert sum(event["num_output_tokens"] for event in events) == 20
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]
    assert generate(server, **body).json()["text_output"] == f"How can you be{whole}"


def test_a_stop_string_cuts_text_where_it_begins(server: ConchServer) -> None:
    body = {"text_input": "I am going to", "max_tokens": 30, "exclude_input_in_output": True}
    body["parameters"] = {"ignore_eos": True}
    whole = generate(server, **body).json()["text_output"]
    stop = whole[len(whole) // 2 - 2 : len(whole) // 2 + 3]
    cut = whole[: whole.index(stop)]
    assert generate(server, stop_words=[stop], **body).json()["text_output"] == cut
    events = stream(server, **{**body, "stop_words": ["not in it at all", stop]})
    assert "".join(event["text_output"] for event in events) == cut


def test_conversations_go_through_the_chat_template(server: ConchServer) -> None:
    assert statistics(server)["runs_with"]["chat_template"] == "yes"
    messages = json.dumps([{"role": "user", "content": "Where is the station?"}])
    told = generate(server, messages=messages, max_tokens=5).json()["text_output"]
    text = "<user>Where is the station?\n<assistant>"
    assert generate(server, text_input=text, max_tokens=5, exclude_input_in_output=True).json()["text_output"] == told


def test_inference_requests_of_a_model_that_does_not_stream(server: ConchServer) -> None:
    inputs = [tensor("text_input", "BYTES", ["How can you be"]), tensor("max_tokens", "INT32", [4])]
    reply = post(server.http, "/v2/models/whole/infer", {"inputs": inputs})
    assert reply.status == 200, reply.body
    assert reply.json()["outputs"][0]["data"][0].startswith("How can you be")
    refused = generate(server, "whole", text_input="a", stream=True)
    assert (refused.status, refused.error) == (400, "Streaming is only supported in decoupled mode.")


def test_streams_over_grpc(server: ConchServer) -> None:
    results: Queue[Any] = Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"How can you be"], np.object_))
        streaming = grpcclient.InferInput("stream", [1], "BOOL")
        streaming.set_data_from_numpy(np.array([True]))
        client.async_stream_infer("llama", [text, streaming], parameters={"max_tokens": 6, "temperature": "0"})
        texts, final = [], False
        while not final:
            result, error = results.get(timeout=60)
            assert error is None
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            output = result.as_numpy("text_output")
            texts += [] if output is None else [one.decode() for one in output]
    body = {"text_input": "How can you be", "max_tokens": 6, "exclude_input_in_output": True}
    assert "".join(texts) == generate(server, **body).json()["text_output"]


def test_a_client_that_leaves_is_gone_from_the_batch(server: ConchServer) -> None:
    before = statistics(server)["generation"]["finished"]["abort"]
    leave(server, "How can you be", after=2)
    eventually(lambda: idle(server), "an empty batch")
    assert statistics(server)["generation"]["finished"]["abort"] == before + 1


def test_a_cancelled_call_is_gone_from_the_batch(server: ConchServer) -> None:
    results: Queue[Any] = Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        text = grpcclient.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"How can you be"], np.object_))
        streaming = grpcclient.InferInput("stream", [1], "BOOL")
        streaming.set_data_from_numpy(np.array([True]))
        client.async_stream_infer(
            "llama", [text, streaming], parameters={"max_tokens": 400, "ignore_eos": True, "temperature": 0}
        )
        assert results.get(timeout=60)[1] is None
        client.stop_stream(cancel_requests=True)
    eventually(lambda: idle(server), "an empty batch")


def test_a_thousand_requests_one_in_five_of_which_leaves(server: ConchServer) -> None:
    before = statistics(server)["generation"]
    chance = random.Random(6)
    text = "How can you be sure"
    leavers = set(chance.sample(range(1000), 200))

    def ask(number: int) -> int:
        if number in leavers:
            leave(server, text, after=1)
            return 0
        reply = generate(server, text_input=text, max_tokens=1 + number % 12, return_num_output_tokens=True)
        assert reply.status == 200, reply.body
        tokens: int = reply.json()["num_output_tokens"]
        return tokens

    with ThreadPoolExecutor(64) as pool:
        tokens = list(pool.map(ask, range(1000)))
    assert all(1 <= tokens[number] <= 1 + number % 12 for number in range(1000) if number not in leavers)
    eventually(lambda: idle(server), "an empty batch", timeout=60)
    after = statistics(server)["generation"]
    ended = {reason: count - before["finished"][reason] for reason, count in after["finished"].items()}
    assert ended == {"abort": 200, "error": 0, "length": ended["length"], "stop": 800 - ended["length"]}


def test_a_full_queue_answers_at_once(server: ConchServer, background: Background) -> None:
    body = {"text_input": "How can you be", "max_tokens": 100, "parameters": {"ignore_eos": True}}
    replies = [reply.result() for reply in [background(generate, server, "narrow", **body) for _ in range(40)]]
    refused = [reply for reply in replies if reply.status != 200]
    assert {(reply.status, reply.error.partition("] ")[2]) for reply in refused} == {
        (503, "Exceeds maximum queue size")
    }
    assert len(replies) - len(refused) >= 4
    eventually(lambda: idle(server, "narrow"), "an empty batch")


@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("llama", {"text_input": "a b " * 600}, 400, "the prompt has "),
        ("llama", {"text_input": "a", "max_tokens": 0}, 400, "sampling parameter 'max_tokens' is 0"),
        ("llama", {"text_input": "a", "max_tokens": 2_000_000_000}, 400, "the prompt has 1 tokens and max_tokens is "),
        ("llama", {"text_input": "a", "parameters": {"temperature": -1}}, 400, "sampling parameter 'temperature'"),
        ("llama", {"text_input": "a", "stop_words": ["x"] * 1000}, 400, "'stop_words' has 1000 stop strings"),
        ("llama", {"text_input": "a", "sampling_parameters": '{"lora_name": "x"}'}, 400, "LoRA x is not supported"),
        ("llama", {"text_input": "a", "sampling_parameters": "[" * 100_000}, 400, "input 'sampling_parameters' is"),
        ("llama", {"text_input": "a", "sampling_parameters": '{"min_tokens": 300}'}, 400, "min_tokens is 300, but "),
        ("llama", {"max_tokens": 4}, 400, "either 'text_input' or 'messages' must be given"),
        ("narrow", {"text_input": "a", "max_tokens": 400}, 400, "the request needs 401 tokens of KV cache, but "),
        ("vllm", {"text_input": "a", "parameters": {"max_tokens": 500}}, 400, "Error generating stream: the prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_at_once(
    server: ConchServer, model: str, body: dict[str, Any], status: int, message: str
) -> None:
    reply = generate(server, model, **body)
    assert (reply.status, reply.error[: len(message)]) == (status, message)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "the " * 600}, "prompt"),
        ("completions", {"prompt": "a", "max_completion_tokens": 1000}, "max_completion_tokens"),
        ("completions", {"prompt": "a", "lora_name": "x"}, "lora_name"),
        ("completions", {"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "stop_token_ids": "x"}, "stop_token_ids"),
        ("completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ("completions", {"prompt": "a", "guided_regex": "[a"}, "guided_regex"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format"),
    ],
)  # fmt: skip
def test_openai_error_names_the_member_that_the_model_refuses(
    server: ConchServer, path: str, body: dict[str, Any], param: str
) -> None:
    messages = {} if "prompt" in body else {"messages": [{"role": "user", "content": "a"}]}
    reply = post(server.http, f"/v1/{path}", {"model": "llama", **messages, **body})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("argument", ["speculative_config", "speculative_model"])
def test_what_an_engine_does_not_have_is_not_passed_over(server: ConchServer, repository: Path, argument: str) -> None:
    folder = repository / argument / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text('backend: "vllm"')
    (folder / "model.json").write_text(json.dumps({"model": str(repository / "llama" / "1"), argument: {"model": "x"}}))
    reply = post(server.http, f"/v2/repository/models/{argument}/load")
    assert "speculative decoding is not supported by engine 'transformers'" in reply.error


def test_the_vllm_backend_has_its_files_defaults_and_texts(server: ConchServer) -> None:
    reply = generate(
        server, "vllm", text_input="How can you be", parameters={"stream": False, "temperature": 0, "ignore_eos": True},
        return_num_output_tokens=True,
    )  # fmt: skip
    assert reply.status == 200, reply.body
    assert reply.json()["num_output_tokens"] == 16
    assert reply.json()["text_output"].startswith("How can you be")
    shown = get(server.http, "/v2/models/vllm/config").json()["parameters"]
    assert shown["conch.instead_of"] == {"string_value": "vllm"}
    assert shown["conch.engine"]["string_value"].startswith("transformers")
    refused = generate(server, "vllm", text_input="a", stream=True, exclude_input_in_output=False)
    assert refused.error == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_metrics_have_vllms_names(server: ConchServer) -> None:
    stream(server, text_input="How can you be", max_tokens=5)
    page = get(server.metrics, "/metrics").body.decode()
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ):
        assert f'{name}{{model="llama",version="1",model_name="llama"' in page, name


def test_a_model_ends_what_it_has_begun_before_it_is_unloaded(server: ConchServer, background: Background) -> None:
    body = {"text_input": "How can you be", "max_tokens": 400, "parameters": {"ignore_eos": True}}
    running = [background(generate, server, "whole", **body) for _ in range(4)]
    eventually(lambda: statistics(server, "whole").get("generation", {}).get("running"), "a batch")
    assert post(server.http, "/v2/repository/models/whole/load").status == 200
    assert post(server.http, "/v2/repository/models/whole/unload").status == 200
    assert [reply.result().status for reply in running] == [200] * 4
    assert post(server.http, "/v2/repository/models/whole/load").status == 200


def test_a_worker_that_dies_fails_its_requests_and_comes_back(server: ConchServer, background: Background) -> None:
    others = {worker.pid for worker in workers(server)}
    assert post(server.http, "/v2/repository/models/narrow/unload").status == 200
    eventually(lambda: len(workers(server)) == len(others) - 1, "its end")
    others = {worker.pid for worker in workers(server)}
    assert post(server.http, "/v2/repository/models/narrow/load").status == 200
    (worker,) = [one for one in workers(server) if one.pid not in others]
    body = {"text_input": "How can you be", "max_tokens": 200, "parameters": {"ignore_eos": True}}
    running = background(generate, server, "narrow", **body)
    eventually(lambda: statistics(server, "narrow").get("generation", {}).get("running"), "a batch")
    worker.kill()
    assert running.result().status == 500
    eventually(lambda: generate(server, "narrow", text_input="a", max_tokens=2).status == 200, "an answer", timeout=60)
    assert idle(server, "narrow")


def test_slow_readers_do_not_stop_the_others(server: ConchServer) -> None:
    host, port = server.http.split(":")
    body = json.dumps({"text_input": "a", "stream": True, "max_tokens": 400, "parameters": {"ignore_eos": True}})
    with socket.create_connection((host, int(port))) as silent:
        head = f"POST /v2/models/llama/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        silent.sendall((head + body).encode())
        reply = requests.post(
            f"http://{server.http}/v2/models/llama/generate", json={"text_input": "a", "max_tokens": 5}, timeout=30
        )
        assert reply.status_code == 200
