"""The rate limiter of both servers: instances of several models share a resource, and impossible loads are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import post, tensor
from tests.conftest import Server, Start
from tests.models import write

#: Returns the times at which it began and ended.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        began = time.monotonic()
        time.sleep(0.05)
        times = pb_utils.Tensor("TIMES", np.array([began, time.monotonic()]))
        return [pb_utils.InferenceResponse([times]) for _ in requests]
"""
CONFIG = """
backend: "python"
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "TIMES" data_type: TYPE_FP64 dims: [ 2 ] }}
instance_group {{ count: 2 kind: KIND_CPU rate_limiter {{ resources {{ {resource} }} }} }}
"""
#: Sequence models that need the same resources as ``most``.
SEQUENCES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 2 }"}
MODELS = {
    "most": 'name: "R" count: 4',
    "half": 'name: "R" count: 2',
    "shared": 'name: "G" count: 3 global: true',
}
IDS = count(1)
FLAGS = ("--rate-limit=execution_count", "--rate-limit-resource=R:4", "--rate-limit-resource=G:3:1")


@pytest.fixture(scope="module")
def limited(start: Start, server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp(f"limited_{server_kind}")
    for name, resource in MODELS.items():
        write(folder / "models", name, CONFIG.format(resource=resource), {"1/model.py": MODEL})
    for name, strategy in SEQUENCES.items():
        config = CONFIG.format(resource=MODELS["most"]) + f"max_batch_size: 2\nsequence_batching {{ {strategy} }}\n"
        write(folder / "models", name, config, {"1/model.py": MODEL.replace("monotonic()])", "monotonic()], ndmin=2)")})
    for name, resource in (("greedy", 'name: "R" count: 5'), ("torn", 'name: "R" count: 1 global: true')):
        write(folder / "models", name, CONFIG.format(resource=resource), {"1/model.py": MODEL})
    loaded = [f"--load-model={name}" for name in [*MODELS, *SEQUENCES]]
    with start(folder / "models", "--model-control-mode=explicit", *loaded, *FLAGS, log=folder / "log") as server:
        yield server


def times(server: Server, model: str) -> tuple[float, float]:
    body: dict[str, Any] = {"inputs": [tensor("INPUT", "INT32", [1], [1])]}
    if model in SEQUENCES:
        body["inputs"] = [tensor("INPUT", "INT32", [[1]], [1, 1])]
        body["parameters"] = {"sequence_id": next(IDS), "sequence_start": True, "sequence_end": True}
    reply = post(server.http, f"/v2/models/{model}/infer", body)
    assert reply.status == 200, reply.body
    (output,) = reply.json()["outputs"]
    began, ended = output["data"]
    return began, ended


def together(server: Server, background: Callable[..., Future[Any]], *models: str) -> list[tuple[float, float]]:
    return sorted(future.result() for future in [background(times, server, model) for model in models])


@pytest.mark.parametrize(
    "models", [("most", "half", "most"), ("shared", "shared", "shared"), ("direct", "oldest", "most")]
)
def test_instances_that_do_not_fit_together_run_in_turns(
    limited: Server, background: Callable[..., Future[Any]], models: tuple[str, ...]
) -> None:
    ran = together(limited, background, *models)
    assert all(former[1] <= latter[0] for former, latter in pairwise(ran))


def test_instances_that_fit_together_run_side_by_side(limited: Server, background: Callable[..., Future[Any]]) -> None:
    for _ in range(20):  # on a busy machine, one may start after the other has ended
        ran = together(limited, background, "half", "shared", "half")
        if any(former[1] > latter[0] for former, latter in pairwise(ran)):
            return
    raise AssertionError("they ran in turns")


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("greedy", 'Resource count for "R" is limited to 4 which will prevent scheduling of one or more model '
         "instances, the minimum required count is 5"),
        ("torn", 'Resource "R" is present as both global and device-specific resource in the model configuration.'),
    ],
)  # fmt: skip
def test_model_whose_instances_could_never_run_is_not_loaded(limited: Server, model: str, error: str) -> None:
    refused = post(limited.http, f"/v2/repository/models/{model}/load", {}).error
    assert (
        refused == f"load failed for model '{model}': version 1 is at UNAVAILABLE state: Invalid argument: {error};\n"
    )
    index = {entry["name"]: entry for entry in post(limited.http, "/v2/repository/index").json()}
    assert index["most"]["state"] == "READY"
    assert times(limited, "most") < times(limited, "half")
