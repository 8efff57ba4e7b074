"""Amazon SageMaker: what ``conch deploy sagemaker`` writes, started as the platform does, answers its requests."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.model import Shape
from botocore.validate import ParamValidator

from tests.conformance.raw import get, post
from tests.deploy.clouds import (
    GENERATE,
    INFER,
    MODEL,
    PREPROCESSING,
    deploy,
    environment_of,
    install,
    instructions,
    repository,
    started,
)  # fmt: skip
from tests.models import write
from tests.oracle.run import free_ports

CALLS = {
    "create-model.json": "CreateModel",
    "create-endpoint-config.json": "CreateEndpointConfig",
    "create-endpoint.json": "CreateEndpoint",
}
BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sagemaker")
    return deploy("sagemaker", repository(folder / "models"), folder / "out")


@pytest.fixture(scope="module")
def place(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for ``/opt/ml``, with the artifact where the platform unpacks it."""
    place = tmp_path_factory.mktemp("ml")
    (place / "model").mkdir()
    subprocess.run(["tar", "-xzf", written / "model.tar.gz", "-C", place / "model"], check=True)
    return place


def start(written: Path, place: Path, folder: Path, port: int, **given: str) -> Any:
    """The server, as ``docker run IMAGE serve`` starts it, with the environment of the calls and what is ``given``."""
    container = written / "container"
    program = install(container / "serve", folder, {"/opt/ml": str(place)})
    (entry,) = instructions(container / "Containerfile", "ENTRYPOINT")
    assert json.loads(entry) == ["/opt/conch/bin/serve-sagemaker"]
    assert "serve /opt/conch/bin/serve-sagemaker" in instructions(container / "Containerfile", "COPY")
    call = json.loads((written / "create-model.json").read_text())["PrimaryContainer"]
    environment = {**environment_of(container / "Containerfile"), **call["Environment"], **given}
    return started(
        [str(program), "serve"], {}, {**environment, "SAGEMAKER_BIND_TO_PORT": str(port)},
        (f"127.0.0.1:{port}", "/ping"), folder / "log", as_root=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def endpoint(written: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, low = sorted(free_ports(2))
    with start(
        written, place, tmp_path_factory.mktemp("endpoint"), port, SAGEMAKER_SAFE_PORT_RANGE=f"{port}-{low}"
    ) as address:
        yield address


def test_the_archive_has_the_models_at_its_root(written: Path) -> None:
    with tarfile.open(written / "model.tar.gz") as archive:
        assert archive.getnames() == [
            "ensemble/1", "ensemble/config.pbtxt", "preprocessing/1/model.py", "preprocessing/config.pbtxt",
        ]  # fmt: skip


def test_the_documented_requests_are_answered(endpoint: str) -> None:
    assert get(endpoint, "/ping").status == 200
    answer = post(endpoint, "/invocations", INFER, {"Content-Type": "application/json"})
    assert (answer.status, answer.json()["outputs"][0]["data"]) == (200, ["SHELL"]), answer.body


def test_tritons_binary_tensors_are_taken_and_given(endpoint: str) -> None:
    text = struct.pack("<I", 5) + b"shell"
    header = json.dumps({
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
    }).encode()  # fmt: skip
    answer = post(endpoint, "/invocations", header + text, {"Content-Type": f"{BINARY}{len(header)}"})
    assert answer.status == 200, answer.body
    size = int(answer.headers["content-type"].removeprefix(BINARY))
    assert answer.body[size:] == struct.pack("<I", 5) + b"SHELL"


def test_the_request_that_is_written_fits_the_model(written: Path, endpoint: str) -> None:
    answer = post(endpoint, "/invocations", (written / "request.json").read_bytes())
    assert answer.json()["outputs"][0]["data"] == ["WHAT IS A CONCH?"]


def test_requests_may_generate(tmp_path: Path, place: Path) -> None:
    written = deploy("sagemaker", repository(tmp_path / "models"), tmp_path / "out", "--endpoint=generate_stream")
    (port,) = free_ports(1)
    with start(written, place, tmp_path, port) as address:
        answer = post(address, "/invocations", GENERATE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(answer.body.removeprefix(b"data: "))["text_output"] == "SHELL"


@pytest.mark.parametrize("several", [False, True])
def test_the_calls_are_what_the_api_takes(several: bool, tmp_path: Path) -> None:
    """By botocore's description of it: types, limits and, which botocore itself leaves to the service, patterns."""
    models = tmp_path / "models"
    write(models, "one", PREPROCESSING, {"1/model.py": MODEL})
    written = deploy("sagemaker", models, tmp_path / "out", *(["--multi-model"] if several else []))
    service = botocore.session.get_session().get_service_model("sagemaker")
    for name, operation in CALLS.items():
        call = json.loads((written / name).read_text())
        shape = service.operation_model(operation).input_shape
        assert shape is not None
        report = ParamValidator().validate(call, shape)
        assert not report.has_errors(), report.generate_report()
        check_patterns(call, shape)


def check_patterns(value: Any, shape: Shape) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            check_patterns(one, shape.value if shape.type_name == "map" else shape.members[key])  # type: ignore[attr-defined]
    elif isinstance(value, list):
        for one in value:
            check_patterns(one, shape.member)  # type: ignore[attr-defined]
    elif isinstance(value, str) and (pattern := shape.metadata.get("pattern")):
        assert re.fullmatch(pattern, value), (shape.name, pattern, value)
    elif isinstance(value, str) and (values := shape.metadata.get("enum")):
        assert value in values


def test_the_image_runs_as_root_and_takes_the_ports_that_it_is_given(written: Path) -> None:
    file = written / "container/Containerfile"
    assert instructions(file, "USER") == ["root"]
    assert instructions(file, "LABEL") == [
        "com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true",
        "com.amazonaws.sagemaker.capabilities.multi-models=true",
    ]
    assert os.access(written / "container/serve", os.X_OK)


def test_an_endpoint_with_several_models_has_an_archive_for_each(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("one", "other"):
        write(models, name, PREPROCESSING, {"1/model.py": MODEL})
    written = deploy("sagemaker", models, tmp_path / "out", "--multi-model")
    assert sorted(path.name for path in (written / "models").iterdir()) == ["one.tar.gz", "other.tar.gz"]
    with tarfile.open(written / "models/one.tar.gz") as archive:
        assert archive.getnames() == ["one/1/model.py", "one/config.pbtxt"]
    (port,) = free_ports(1)
    with start(written, tmp_path, tmp_path, port, SAGEMAKER_MULTI_MODEL="true") as address:
        assert get(address, "/models").json() == {"models": []}
