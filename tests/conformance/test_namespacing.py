"""Models with the same name in two repositories: ``--model-namespacing``."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import Reply, Request, post, send, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import write

_TENSORS = """
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
_ANSWERING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answer = np.array([NUMBER], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", answer)]) for _ in requests]
"""
_CALLING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        call = pb_utils.InferenceRequest(
            model_name="twin", inputs=request.inputs(), requested_output_names=["Y"]
        )
        answer = call.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse(answer.output_tensors())
"""
AMBIGUOUS = (
    "There are 2 identifiers of model 'twin' in global map, model namespace must be provided to resolve ambiguity."
)


def ensemble(member: str, more: str = "") -> str:
    maps = 'input_map {key: "X" value: "X"} output_map {key: "Y" value: "Y"}'
    step = f'{{model_name: "{member}" model_version: -1 {more} {maps}}}'
    return f'platform: "ensemble" {_TENSORS} ensemble_scheduling {{step [{step}]}}'


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create both, with ``twin`` and an ensemble of it, and with models that the other repository does not have."""
    root = tmp_path_factory.mktemp("namespaces")
    one, two = root / "one", root / "two"
    for number, (home, other) in enumerate(((one, two), (two, one)), 1):
        config, model = f'backend: "python" {_TENSORS}', _ANSWERING.replace("NUMBER", str(number))
        for name in ("twin", f"single_{home.name}"):
            write(home, name, config, {"1/model.py": model})
        write(home, f"caller_{home.name}", config, {"1/model.py": _CALLING})
        for name, more in (
            ("both", ""),
            (f"plain_{home.name}", ""),
            (f"other_{home.name}", f'model_namespace: "{other}"'),
        ):
            write(home, name, ensemble("twin", more), {"1/.keep": ""})
    return one, two


@pytest.fixture(scope="module")
def twins(start: Start, server_kind: str, repositories: tuple[Path, Path]) -> Iterator[Server]:
    one, two = repositories
    flags = [f"--model-repository={two}", "--model-namespacing=true", "--model-control-mode=explicit"]
    with start(one, *flags) as server:
        for name in ("single_one", "single_two", "plain_one", "plain_two", "other_one", "other_two", "both"):
            assert post(server.http, f"/v2/repository/models/{name}/load", {}).status == 200
        for name in ("caller_one", "caller_two"):
            assert post(server.http, f"/v2/repository/models/{name}/load", {}).status == 200
        yield server


def index(server: Server) -> list[dict[str, Any]]:
    return post(server.http, "/v2/repository/index", {}).json()  # type: ignore[no-any-return]


def infer(server: Server, name: str) -> Reply:
    return post(server.http, f"/v2/models/{name}/infer", {"inputs": [tensor("X", "INT32", [1], [1])]})


def test_index_has_the_models_of_each_repository_by_name(twins: Server) -> None:
    assert [entry["name"] for entry in index(twins)] == [
        "both", "caller_one", "other_one", "plain_one", "single_one", "twin",
        "both", "caller_two", "other_two", "plain_two", "single_two", "twin",
    ]  # fmt: skip
    assert {entry["state"] for entry in index(twins)} == {"READY"}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("single_one", 1), ("single_two", 2), ("plain_one", 1), ("plain_two", 2),
        # Triton 2.51 uses the step's model in the ensemble's own repository, regardless of ``model_namespace``.
        ("other_one", 1), ("other_two", 2),
    ],
)  # fmt: skip
def test_a_name_that_is_unique_serves_and_ensembles_stay_in_their_repository(
    twins: Server, name: str, answer: int
) -> None:
    reply = infer(twins, name).json()
    assert (reply["model_name"], reply["outputs"][0]["data"]) == (name, [answer])


@pytest.mark.parametrize("path", ["", "/config", "/versions/9", "/infer"])
def test_a_name_that_two_models_have_is_refused(twins: Server, path: str) -> None:
    get = Request("GET", f"/v2/models/twin{path}")
    reply = infer(twins, "twin") if path == "/infer" else send(twins.http, get)
    assert (reply.status, reply.error) == (400, AMBIGUOUS)


def test_a_name_that_two_models_have_is_not_ready_and_has_no_statistics(twins: Server) -> None:
    assert send(twins.http, Request("GET", "/v2/models/twin/ready")).status == 400
    reply = send(twins.http, Request("GET", "/v2/models/twin/stats"))
    assert (reply.status, reply.error) == (400, "requested model 'twin' is not available")


@pytest.mark.parametrize("name", ["caller_one", "caller_two"])
def test_a_model_cannot_call_a_name_that_two_models_have(twins: Server, name: str) -> None:
    expected = "Failed for execute the inference request. Model 'twin' is not ready."
    assert infer(twins, name).error.endswith(expected)


def test_metrics_name_the_repository(twins: Server, repositories: tuple[Path, Path]) -> None:
    with urllib.request.urlopen(f"http://{twins.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    for home in repositories:
        for name in ("twin", f"single_{home.name}"):
            labels = f'{{model="{name}",namespace="{home}",version="1"}}'
            assert any(line.startswith(f"nv_inference_request_success{labels} ") for line in lines)


def test_an_override_must_be_for_one_model(twins: Server, server_kind: str) -> None:
    if server_kind == "triton":
        pytest.skip("2.51 accepts one configuration for both")
    parameters = {"parameters": {"config": '{"backend": "python"}'}}
    reply = post(twins.http, "/v2/repository/models/twin/load", parameters)
    assert (reply.status, reply.error) == (400, AMBIGUOUS)


def test_models_of_one_name_are_loaded_and_unloaded_together(twins: Server) -> None:
    def states(name: str) -> list[str]:
        return [entry["state"] for entry in index(twins) if entry["name"] == name]

    assert post(twins.http, "/v2/repository/models/twin/unload", {}).status == 200
    for name, count in (("twin", 2), ("both", 2), ("plain_one", 1)):
        eventually(lambda name=name, count=count: states(name) == ["UNAVAILABLE"] * count, f"{name} is unloaded")
    assert infer(twins, "plain_two").status == 404
    assert infer(twins, "single_one").status == 200
    assert post(twins.http, "/v2/repository/models/twin/load", {}).status == 200
    assert states("twin") == ["READY"] * 2
    eventually(lambda: states("both") == ["READY"] * 2, "the ensembles are back")
    assert infer(twins, "plain_two").json()["outputs"][0]["data"] == [2]
