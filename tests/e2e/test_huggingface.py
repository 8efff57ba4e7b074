"""Checkpoints served as they are: no model.py, and no config.pbtxt but where a test wants one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests import text_checkpoints
from tests.checkpoints import add_to_cache
from tests.conformance.raw import get, post, tensor
from tests.e2e.processes import workers
from tests.events import eventually
from tests.servers import ConchServer

WORDS = [
    "anna",
    "works",
    "at",
    "the",
    "library",
    "near",
    "station",
    "and",
    "takes",
    "bus",
    "in",
    "morning",
    "how",
    "can",
    "you",
    "be",
    "sure",
    "that",
    "it",
    "is",
    "open",
]
Background = Callable[..., Future[Any]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``classifier`` (a checkpoint as a version directory), ``embedder`` (two instances), ``strict``, ``hub``."""
    folder = tmp_path_factory.mktemp("repository")
    text_checkpoints.write(
        folder / "classifier" / "1", "AutoModelForSequenceClassification", id2label={0: "bad", 1: "good", 2: "odd"}
    )
    text_checkpoints.write(folder / "embedder" / "1", "AutoModel")
    (folder / "embedder" / "config.pbtxt").write_text("instance_group { count: 2 kind: KIND_CPU }")
    shutil.copytree(folder / "classifier" / "1", folder / "strict" / "1")
    (folder / "strict" / "config.pbtxt").write_text(
        'max_batch_size: 4 parameters { key: "truncation" value { string_value: "refuse" } }'
    )
    hub = folder / "hub" / "1"
    hub.mkdir(parents=True)
    (hub / "model.json").write_text('{"model": "tiny/classifier"}')
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    cache = tmp_path_factory.mktemp("cache")
    add_to_cache(cache, "tiny/classifier", repository / "classifier" / "1")
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    with ConchServer(repository, log=cache / "server.log", env=environment) as server:
        yield server


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 40 words, most of them short."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=min(40, 1 + int(chance.expovariate(0.15))))) for _ in range(count)]


def embed(server: ConchServer, *rows: str) -> np.ndarray[Any, Any]:
    client = httpclient.InferenceServerClient(server.http)
    given = httpclient.InferInput("text_input", [len(rows), 1], "BYTES")
    given.set_data_from_numpy(np.array([[row] for row in rows], dtype=np.object_))
    embedding = client.infer("embedder", [given]).as_numpy("embedding")
    assert embedding is not None
    return embedding


def ask(server: ConchServer, model: str, *rows: Any, **fields: Any) -> Any:
    body = {"inputs": [tensor("text_input", "BYTES", list(rows), [len(rows), 1])], **fields}
    return post(server.http, f"/v2/models/{model}/infer", body)


def test_a_checkpoint_answers_generate_with_its_labels(server: ConchServer) -> None:
    reply = post(server.http, "/v2/models/classifier/generate", {"text_input": "anna takes the bus"})
    answer = reply.json()
    assert reply.status == 200
    assert sorted(answer["label"]) == ["bad", "good", "odd"]
    assert answer["score"] == sorted(answer["score"], reverse=True)
    assert sum(answer["score"]) == pytest.approx(1, abs=1e-5)
    assert "logits" not in answer


def test_each_of_several_texts_gets_an_answer(server: ConchServer) -> None:
    texts = ["anna takes the bus", "the library"]
    single = [post(server.http, "/v2/models/classifier/generate", {"text_input": text}).json() for text in texts]
    both = post(server.http, "/v2/models/classifier/generate", {"text_input": texts, "top_k": 2}).json()
    assert both["label"] == [one["label"][:2] for one in single]
    for scores, one in zip(both["score"], single, strict=True):
        assert scores == pytest.approx(one["score"][:2], abs=1e-5)
    (only,) = post(server.http, "/v2/models/classifier/generate", {"text_input": texts[:1]}).json()["label"]
    assert only == single[0]["label"]


def test_workers_share_what_they_import(server: ConchServer) -> None:
    memory = [worker.memory_full_info() for worker in workers(server)]
    assert len(memory) == 4
    assert all(one.uss < one.rss / 3 for one in memory), memory


def test_misspelt_option_is_refused_in_every_protocol(server: ConchServer) -> None:
    refusal = "parameter 'tpo_k' is not known to model 'classifier'; did you mean 'top_k'?"
    reply = post(server.http, "/v2/models/classifier/generate", {"text_input": "anna", "tpo_k": 1})
    assert (reply.status, reply.error) == (400, refusal)
    reply = ask(server, "classifier", "anna", parameters={"tpo_k": 1})
    assert (reply.status, reply.error) == (400, refusal)
    given = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([["anna"]], dtype=np.object_))
    with pytest.raises(grpcclient.InferenceServerException, match=r"did you mean 'top_k'\?"):
        grpcclient.InferenceServerClient(server.grpc).infer("classifier", [given], parameters={"tpo_k": 1})


def test_logits_are_given_to_requests_that_name_them(server: ConchServer) -> None:
    reply = ask(server, "classifier", "anna", outputs=[{"name": "logits"}, {"name": "label"}])
    assert [output["name"] for output in reply.json()["outputs"]] == ["label", "logits"]


def test_metadata_tells_the_tensors_of_the_task(server: ConchServer) -> None:
    metadata = get(server.http, "/v2/models/classifier").json()
    assert metadata["platform"] == "huggingface"
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert {"name": "score", "datatype": "FP32", "shape": [-1, -1]} in metadata["outputs"]


def test_grpc_and_http_give_the_same(server: ConchServer) -> None:
    client = grpcclient.InferenceServerClient(server.grpc)
    given = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([["the library is open"]], dtype=np.object_))
    embedding = client.infer("embedder", [given]).as_numpy("embedding")
    assert np.array_equal(embedding, embed(server, "the library is open"))


def test_a_model_of_the_hub_is_named_in_model_json(server: ConchServer) -> None:
    here = post(server.http, "/v2/models/classifier/generate", {"text_input": "anna"}).json()
    there = post(server.http, "/v2/models/hub/generate", {"text_input": "anna"}).json()
    assert (there["label"], there["score"]) == (here["label"], here["score"])


def test_instances_are_threads_of_one_worker(server: ConchServer) -> None:
    assert len(workers(server)) == 4  # one for each model
    config = get(server.http, "/v2/models/embedder/config").json()
    assert config["instance_group"][0]["count"] == 2


def test_in_a_busy_batch_every_text_gets_what_it_gets_alone(server: ConchServer, background: Background) -> None:
    asked = texts(120)
    alone = [embed(server, text) for text in asked]
    together = [background(embed, server, text) for text in asked]
    for expected, future in zip(alone, together, strict=True):
        np.testing.assert_allclose(future.result(60), expected, atol=2e-5)


def test_rows_of_one_request_come_back_in_their_order(server: ConchServer) -> None:
    asked = texts(64, seed=1)
    rows = embed(server, *asked)
    for text, row in zip(asked, rows, strict=True):
        np.testing.assert_allclose(embed(server, text)[0], row, atol=2e-5)


def test_a_text_that_is_cut_is_reported_in_the_response(server: ConchServer) -> None:
    reply = ask(server, "classifier", "anna " * 100, "anna").json()
    assert reply["parameters"]["truncated"] == 1


def test_a_text_that_is_too_long_is_refused_where_the_configuration_says_so(server: ConchServer) -> None:
    reply = ask(server, "strict", "anna", "anna " * 100)
    assert reply.status == 400
    assert "row 1; the model takes at most 64" in reply.error


@pytest.mark.parametrize("case", ["too many", "not text", "no input", "unknown option"])
def test_bad_input_gets_one_clear_error_and_the_server_serves_on(server: ConchServer, case: str) -> None:
    path = "/v2/models/classifier/infer"
    match case:
        case "too many":
            reply, said = ask(server, "classifier", *["anna"] * 100_000), "batch-size must be <= 256"
        case "not text":
            reply = post(server.http, path, {"inputs": [tensor("text_input", "FP32", [1.0], [1, 1])]})
            said = "data-type"
        case "no input":
            reply, said = post(server.http, path, {"inputs": []}), "expected"
        case _:
            given = [tensor("text_input", "BYTES", ["a"], [1, 1]), tensor("colour", "BYTES", ["red"], [1, 1])]
            reply, said = post(server.http, path, {"inputs": given}), "unexpected inference input 'colour'"
    assert reply.status == 400
    assert said in reply.error
    assert ask(server, "classifier", "anna").status == 200


def test_bytes_that_are_not_utf8_are_refused_and_their_neighbours_answered(
    server: ConchServer, background: Background
) -> None:
    def raw(data: bytes) -> str:
        given = httpclient.InferInput("text_input", [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([[data]], dtype=np.object_))
        try:
            httpclient.InferenceServerClient(server.http).infer("classifier", [given])
        except Exception as error:
            return str(error)
        return "answered"

    asked = [background(raw, b"anna \xff" if number % 3 == 0 else b"anna") for number in range(30)]
    for number, future in enumerate(asked):
        said = future.result(60)
        assert ("not valid UTF-8: element 0, byte 5" in said) if number % 3 == 0 else said == "answered"


def test_clients_that_hang_up_while_they_wait_leave_nothing_behind(server: ConchServer, background: Background) -> None:
    asked = [background(embed, server, *texts(64, seed)) for seed in range(8)]
    host, port = server.http.split(":")
    for _ in range(40):
        body = b'{"text_input": "anna takes the bus"}'
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v2/models/embedder/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
    for future in asked:
        assert future.result(60).shape == (64, 32)
    pending = 'nv_inference_pending_request_count{model="embedder",version="1"} 0'
    eventually(lambda: pending in requests.get(f"http://{server.metrics}/metrics").text, "an empty queue")


def test_tokens_and_padding_are_counted(server: ConchServer) -> None:
    embed(server, "anna", "anna takes the bus in the morning")
    page = requests.get(f"http://{server.metrics}/metrics").text
    counted = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines()
               if line.startswith("conch_") and 'model="embedder"' in line and "bucket" not in line}  # fmt: skip
    assert counted["conch_tokens"] > counted["conch_padding_tokens"] > 0
    assert counted["conch_sequences"] >= counted["conch_engine_runs"] > 0
    assert counted["conch_tokenize_duration_us"] > 0
    assert counted["conch_engine_duration_us"] > 0 and counted["conch_answer_duration_us"] > 0


def test_a_worker_that_is_killed_comes_back(
    repository: Path, tmp_path: Path, stack: ExitStack, background: Background
) -> None:
    shutil.copytree(repository / "classifier", tmp_path / "models" / "classifier")
    server = stack.enter_context(ConchServer(tmp_path / "models"))
    [worker] = workers(server)
    asked = [background(ask, server, "classifier", *texts(64, seed)) for seed in range(16)]
    os.kill(worker.pid, signal.SIGKILL)
    assert {future.result(60).status for future in asked} <= {200, 500}
    assert ask(server, "classifier", "anna").status == 200


def test_a_checkpoint_that_lacks_its_weights_is_not_served(repository: Path, tmp_path: Path, stack: ExitStack) -> None:
    broken = tmp_path / "models" / "broken" / "1"
    shutil.copytree(repository / "classifier" / "1", broken)
    (broken / "model.safetensors").unlink()
    log = tmp_path / "log"
    server = stack.enter_context(ConchServer(tmp_path / "models", "--exit-on-error=false", log=log, wait=False))
    eventually(lambda: "failed to load 'broken'" in log.read_text(), "the reason in the log", 60)
    assert "weights" in log.read_text()
    assert get(server.http, "/v2/health/live").status == 200
