"""Cached responses of an ensemble when the model of a step, or of a nested ensemble's step, is reloaded."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ConchServer

MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("OUT", np.array([{value}], np.int32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
TENSORS = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""
ENSEMBLE = """platform: "ensemble"
response_cache { enable: true }
ensemble_scheduling { step [{
  model_name: "%s" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
}] }
"""


def write(repository: Path, value: int) -> None:
    (repository / "constant" / "1" / "model.py").write_text(MODEL.format(value=value))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in (
        ("constant", 'backend: "python"'),
        ("inner", ENSEMBLE % "constant"),
        ("outer", ENSEMBLE % "inner"),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config + TENSORS)
    write(tmp_path, 1)
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[ConchServer]:
    flags = ("--cache-config=local,size=1048576", "--model-control-mode=explicit", "--load-model=outer")
    with ConchServer(repository, *flags) as running:
        yield running


def ask(server: ConchServer, path: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://{server.http}/v2/{path}", data), timeout=60) as answer:
        content = answer.read()
    return json.loads(content) if content else {}


def infer(server: ConchServer, model: str) -> int:
    tensor = {"name": "IN", "shape": [1], "datatype": "INT32", "data": [0]}
    answer = ask(server, f"models/{model}/infer", {"inputs": [tensor]})
    return answer["outputs"][0]["data"][0]  # type: ignore[index, no-any-return]


@pytest.mark.parametrize("model", ["inner", "outer"])
def test_answers_of_members_that_have_been_replaced_are_not_given(
    server: ConchServer, repository: Path, model: str
) -> None:
    assert [infer(server, model) for _ in range(3)] == [1, 1, 1]
    assert server.cache_hits(model) == 2

    write(repository, 22)
    ask(server, "repository/models/constant/load", {})

    assert [infer(server, model) for _ in range(3)] == [22, 22, 22]
    assert server.cache_hits(model) == 4


def test_a_load_that_changes_nothing_forgets_nothing(server: ConchServer) -> None:
    assert infer(server, "outer") == 1
    ask(server, "repository/models/constant/load", {})
    assert infer(server, "outer") == 1
    assert server.cache_hits("outer") == 1
