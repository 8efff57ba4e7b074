"""KServe's resources: their fields are KServe's, and what they run serves what KServe puts below /mnt/models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from transformers import LlamaConfig

from tests.checkpoints import train_tokenizer, write_checkpoint
from tests.conformance.raw import Request, get, post, send, tensor
from tests.deploy.processes import ContainerProcess
from tests.deploy.registry import ROOT, KServeTypes
from tests.models import build

FOLDER = ROOT / "deploy/kserve"
RUNTIMES = {one["metadata"]["name"]: one for one in yaml.safe_load_all((FOLDER / "runtimes.yaml").read_text())}
SERVICES = list(yaml.safe_load_all((FOLDER / "services.yaml").read_text()))
TYPES = {
    "ClusterServingRuntime": "V1alpha1ServingRuntimeSpec",
    "InferenceService": "V1beta1InferenceServiceSpec",
    "TrainedModel": "V1alpha1TrainedModelSpec",
}
BODY = {"inputs": [tensor(name, "INT32", [1] * 16, [16]) for name in ("INPUT0", "INPUT1")]}


def container(runtime: str) -> dict[str, Any]:
    (found,) = RUNTIMES[runtime]["spec"]["containers"]
    return dict(found)


def test_fields_are_those_of_kserve() -> None:
    types = KServeTypes()
    for resource in (*RUNTIMES.values(), *SERVICES):
        assert types.wrong(resource["spec"], TYPES[resource["kind"]], resource["kind"]) == []
    assert types.wrong({"containers": [], "protocolVersion": "v2"}, TYPES["ClusterServingRuntime"]) == [
        ".protocolVersion"
    ]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_containers_are_valid(runtime: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container(runtime)]}}
    kubernetes_validate.validate(pod, "1.34", strict=True)


def test_services_name_runtimes_and_formats_that_there_are() -> None:
    for service in SERVICES:
        if service["kind"] == "InferenceService":
            model = service["spec"]["predictor"]["model"]
            spec = RUNTIMES[model["runtime"]]["spec"]
            assert model["modelFormat"]["name"] in {
                supportedModelFormat["name"] for supportedModelFormat in spec["supportedModelFormats"]
            }
            assert model["protocolVersion"] in spec["protocolVersions"]


def test_a_repository(tmp_path: Path) -> None:
    places = {"/mnt/models": build(tmp_path / "models", "add_sub", "plus_one")}
    with ContainerProcess(container("conch")["args"], places, tmp_path / "log") as server:
        assert post(server.http, "/v2/models/add_sub/infer", BODY).status == 200


def test_one_checkpoint_has_the_name_of_its_service(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models", LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=3)
    arguments = [argument.replace("{{.Name}}", "writer") for argument in container("conch-huggingface")["args"]]
    with ContainerProcess(arguments, {"/mnt/models": tmp_path / "models"}, tmp_path / "log") as server:
        reply = post(server.http, "/v2/models/writer/generate", {"text_input": "the", "max_tokens": 3})
        assert reply.status == 200, reply.body


def test_the_agent_adds_and_removes_models(tmp_path: Path) -> None:
    """As KServe's puller does: it puts the folder there, posts {} to load, and for unload removes the folder first."""
    models = tmp_path / "models"
    models.mkdir()
    shelf = build(tmp_path / "shelf", "add_sub")
    with ContainerProcess(container("conch-multi-model")["args"], {"/mnt/models": models}, tmp_path / "log") as server:
        shutil.copytree(shelf / "add_sub", models / "add_sub")
        assert post(server.http, "/v2/repository/models/add_sub/load", {}).status == 200
        assert post(server.http, "/v2/models/add_sub/infer", BODY).status == 200
        assert post(server.http, "/v2/repository/models/absent/load", {}).status == 500
        assert get(server.http, "/v2/health/ready").status == 200
        shutil.rmtree(models / "add_sub")
        assert send(server.http, Request("POST", "/v2/repository/models/add_sub/unload", {})).status == 200
        assert post(server.http, "/v2/models/add_sub/infer", BODY).status in (400, 404)
        assert get(server.http, "/v2/health/ready").status == 200
