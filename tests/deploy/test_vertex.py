"""Google Vertex AI: what ``conch deploy vertex`` writes, started as the platform does, answers its requests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import get, post
from tests.deploy.clouds import GENERATE, INFER, deploy, environment_of, install, instructions, repository, started
from tests.oracle.run import free_ports


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vertex")
    return deploy("vertex", repository(folder / "models"), folder / "out")


def start(written: Path, folder: Path, artifacts: str = "") -> Any:
    """The server with the environment that Vertex AI documents; ``artifacts`` is the platform's copy of them."""
    container = written / "container"
    program = install(container / "start", folder, {"/models}": f"{written / 'model_repository'}}}"})
    (entry,) = instructions(container / "Containerfile", "ENTRYPOINT")
    assert json.loads(entry) == ["/opt/conch/bin/start-vertex"]
    assert "container/start /opt/conch/bin/start-vertex" in instructions(container / "Containerfile", "COPY")
    (port,) = free_ports(1)
    health = flag(written, "container-health-route")
    environment = {
        **environment_of(container / "Containerfile"),
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": health,
        "AIP_PREDICT_ROUTE": flag(written, "container-predict-route"),
        "AIP_STORAGE_URI": artifacts,
    }
    return started([str(program), "--metrics-port=0"], {}, environment, (f"127.0.0.1:{port}", health), folder / "log")


def flag(written: Path, name: str) -> str:
    """What the upload in the steps gives for a flag."""
    (value,) = re.findall(rf"--{name}=(\S+)", (written / "README.md").read_text())
    return str(value)


@pytest.fixture(scope="module")
def node(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start(written, tmp_path_factory.mktemp("node")) as address:
        yield address


def test_health_and_raw_requests_are_answered(node: str) -> None:
    assert get(node, "/health").status == 200
    answer = post(node, "/predict", INFER, {"Content-Type": "application/json"})
    assert (answer.status, answer.json()["outputs"][0]["data"]) == (200, ["SHELL"]), answer.body


def test_any_other_endpoint_is_reached_by_tritons_header(node: str) -> None:
    headers = {"X-Vertex-Ai-Triton-Redirect": "v2/models/ensemble/generate"}
    assert post(node, "/predict", GENERATE, headers).json()["text_output"] == "SHELL"


def test_requests_in_vertexs_own_form_are_refused_as_by_triton(node: str) -> None:
    answer = post(node, "/predict", {"instances": [{"text_input": "shell"}]})
    assert answer.status == 500
    assert answer.error == "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"


def test_the_request_that_is_written_fits_the_model(written: Path, node: str) -> None:
    answer = post(node, "/predict", (written / "request.json").read_bytes())
    assert answer.json()["outputs"][0]["data"] == ["WHAT IS A CONCH?"]


def test_the_repository_is_in_the_image_and_an_ensemble_keeps_its_version(written: Path) -> None:
    file = written / "container/Containerfile"
    assert "model_repository /models" in instructions(file, "COPY")
    models = written / "model_repository"
    assert sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_file()) == [
        "ensemble/1/.keep", "ensemble/config.pbtxt", "preprocessing/1/model.py", "preprocessing/config.pbtxt",
    ]  # fmt: skip
    assert os.access(written / "container/start", os.X_OK)
    assert "--artifact-uri" not in (written / "README.md").read_text()


def test_a_repository_from_a_bucket_may_stream(tmp_path: Path) -> None:
    """The platform's copy is a folder here: that repositories may be in Cloud Storage is tested elsewhere."""
    models = repository(tmp_path / "models")
    written = deploy("vertex", models, tmp_path / "out", "--from-bucket", "--endpoint=generate_stream")
    assert flag(written, "artifact-uri") == "gs://BUCKET/conch-ensemble/model_repository"
    assert "model_repository /models" not in instructions(written / "container/Containerfile", "COPY")
    with start(written, tmp_path, str(written / "model_repository")) as address:
        answer = post(address, flag(written, "container-predict-route"), GENERATE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(answer.body.removeprefix(b"data: "))["text_output"] == "SHELL"
