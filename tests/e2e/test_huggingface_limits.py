"""Requests that would take a worker's memory or time for nothing."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from tests import task_checkpoints, text_checkpoints
from tests.conformance.raw import get, post, tensor
from tests.e2e.processes import workers
from tests.events import eventually
from tests.servers import ConchServer

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
NO_BATCHES = """
    backend: "huggingface" max_batch_size: 0
    input { name: "text_input" data_type: TYPE_STRING dims: [1] }
    output { name: "score" data_type: TYPE_FP32 dims: [1] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    """``rerank``; ``batches``, the same with batches of 64 tokens; ``writer``."""
    models = tmp_path_factory.mktemp("models")
    folder = text_checkpoints.write(models / "rerank" / "1", "AutoModelForSequenceClassification", num_labels=1)
    shutil.copytree(folder, models / "batches" / "1")
    (models / "batches" / "1" / "model.json").write_text('{"max_batch_tokens": 64}')
    task_checkpoints.t5(models / "writer" / "1")
    with ConchServer(models, env=ENVIRONMENT) as server:
        yield server


def infer(server: ConchServer, model: str, *inputs: Any) -> Any:
    return post(server.http, f"/v2/models/{model}/infer", {"inputs": list(inputs)})


def text(name: str, value: str) -> Any:
    return tensor(name, "BYTES", [value], [1, 1])


def number(name: str, value: int) -> Any:
    return tensor(name, "INT32", [value], [1, 1])


def test_a_pair_of_very_long_texts_is_cut_and_the_worker_lives(server: ConchServer) -> None:
    before = workers(server)
    reply = infer(server, "rerank", text("text_input", "anna " * 50_000), text("text_pair", "bus " * 50_000))
    assert reply.status == 200 and reply.json()["parameters"]["truncated"] == 1
    assert workers(server) == before
    # Tokenising this takes seconds.
    reply = infer(server, "rerank", text("text_input", "anna " * 500_000), text("text_pair", "bus"))
    assert reply.status == 400
    assert "input 'text_input' has a text of 2500000 bytes; at most 1048576 are read" in reply.json()["error"]


def test_a_text_that_is_no_longer_awaited_is_not_written_to_its_end(
    server: ConchServer, background: Callable[..., Future[Any]]
) -> None:
    endless = [text("text_input", "the bus"), number("max_new_tokens", 65_536), number("min_length", 65_536)]
    body = json.dumps({"inputs": endless}).encode()
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v2/models/writer/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        started = 'nv_inference_pending_request_count{model="writer",version="1"} 1'
        second = background(infer, server, "writer", text("text_input", "a"), number("max_new_tokens", 3))
        eventually(lambda: started in requests.get(f"http://{server.metrics}/metrics").text, "one that waits")
    assert second.result(60).status == 200


def test_a_model_without_a_batch_dimension_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    text_checkpoints.write(tmp_path / "single" / "1", "AutoModelForSequenceClassification", num_labels=1)
    (tmp_path / "single" / "config.pbtxt").write_text(NO_BATCHES)
    flags = ("--model-control-mode=explicit", "--disable-auto-complete-config")
    server = stack.enter_context(ConchServer(tmp_path, *flags, env=ENVIRONMENT))
    reply = post(server.http, "/v2/repository/models/single/load")
    assert reply.status == 400 and "has max_batch_size 0" in reply.error
    assert get(server.http, "/v2/health/live").status == 200


def pairs(queries: list[str], documents: list[str]) -> list[Any]:
    """The inputs of a reranker."""
    return [
        tensor(name, "BYTES", texts, [len(texts), 1])
        for name, texts in (("text_input", queries), ("text_pair", documents))
    ]


def score(reply: Any) -> list[float]:
    assert reply.status == 200, reply.json()
    return next(output["data"] for output in reply.json()["outputs"] if output["name"] == "score")


def test_short_requests_run_between_the_batches_of_a_large_one(
    server: ConchServer, background: Callable[..., Future[Any]]
) -> None:
    documents = [f"{text_checkpoints.TEXTS[index % 5]} {index}" for index in range(1000)]
    large = background(infer, server, "batches", *pairs(["where is it?"] * 1000, documents))
    shorts = []
    while not large.done():
        shorts.append(score(infer(server, "batches", *pairs(["where is it?"], documents[-1:]))))
    scores = score(large.result())
    assert len(shorts) > 5  # two, if each waited for the end of the large one
    assert shorts == [pytest.approx(scores[-1:], rel=1e-4)] * len(shorts)
    part = score(infer(server, "batches", *pairs(["where is it?"] * 20, documents[:20])))
    assert scores[:20] == pytest.approx(part, rel=1e-4)


def test_pairs_that_cannot_be_scored_get_one_clear_error_and_the_others_a_score(server: ConchServer) -> None:
    def error(queries: list[str], documents: list[str]) -> str:
        return str(infer(server, "rerank", *pairs(queries, documents)).json()["error"])

    assert "inference input 'text_pair' for model 'rerank', got 0" in error([], [])
    assert "batch-size must be <= 1024 for 'rerank'" in error(["a"] * 10_000, ["b"] * 10_000)
    assert "The surrogate pair in string is invalid" in error(["a"], ["\ud800"])
    assert "batch size does not match other inputs" in error(["a", "b"], ["c"])
    assert len(score(infer(server, "rerank", *pairs(["", "", "a"], ["", "b", ""])))) == 3
    assert len(score(infer(server, "rerank", *pairs(["a"], ["bus " * 250_000])))) == 1
