"""OCI Data Science: what ``conch deploy oci`` writes, started as the platform does, answers its requests."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hcl2
import pytest

from tests.conformance.raw import get, post
from tests.deploy.clouds import GENERATE, INFER, deploy, entry_point, instructions, repository, started
from tests.deploy.registry import OciTypes
from tests.oracle.run import free_ports

MOUNT = "/opt/ds/model/deployed_model"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oci")
    return deploy("oci", repository(folder / "models"), folder / "out", "--endpoint=generate", "--name=upper")


@pytest.fixture(scope="module")
def terraform(written: Path) -> dict[str, Any]:
    with (written / "terraform/main.tf").open() as file:
        document: dict[str, Any] = hcl2.load(file)
    return document


def plain(value: Any) -> Any:
    """A value of Terraform's without the quotation marks that the parser keeps."""
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items() if key != "__is_block__"}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value[1:-1] if isinstance(value, str) and value.startswith('"') else value


def resource(terraform: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = (one[kind] for one in plain(terraform["resource"]) if kind in one)
    (inner,) = found.values()
    assert isinstance(inner, dict)
    return inner


def block(holder: dict[str, Any], name: str) -> dict[str, Any]:
    (inner,) = holder[name]
    assert isinstance(inner, dict)
    return inner


@dataclass(frozen=True)
class Container:
    """The deployment's configuration, and the address at which its server answers."""

    configuration: dict[str, Any]
    address: str


@pytest.fixture(scope="module")
def container(
    written: Path, terraform: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    """The server with the command and the environment of the deployment, over the unpacked artifact."""
    details = block(resource(terraform, "oci_datascience_model_deployment"), "model_deployment_configuration_details")
    configuration = block(details, "environment_configuration_details")
    folder = tmp_path_factory.mktemp("container")
    with zipfile.ZipFile(written / "artifact.zip") as archive:
        archive.extractall(folder / "deployed_model")
    unpacked = sorted((folder / "deployed_model").rglob("*"))
    for path in unpacked:
        path.chmod(0o555)  # the platform mounts them read-only
    (port,) = free_ports(1)
    places = {MOUNT: str(folder / "deployed_model"), f"={configuration['server_port']}": f"={port}"}
    command = [*entry_point(), *configuration["cmd"], "--metrics-port=0"]
    variables = configuration["environment_variables"]
    health = (f"127.0.0.1:{port}", variables["MODEL_DEPLOY_HEALTH_ENDPOINT"])
    with started(command, places, variables, health, folder / "log") as address:
        yield Container(configuration, address)
    assert sorted((folder / "deployed_model").rglob("*")) == unpacked


def test_the_archive_has_the_repository_below_the_folder_of_the_command(written: Path) -> None:
    with zipfile.ZipFile(written / "artifact.zip") as archive:
        assert archive.namelist() == [
            "model_repository/ensemble/1/",
            "model_repository/ensemble/config.pbtxt",
            "model_repository/preprocessing/1/model.py",
            "model_repository/preprocessing/config.pbtxt",
        ]


def test_requests_that_the_deployment_maps_are_answered(container: Container) -> None:
    mapped = container.configuration["environment_variables"]["MODEL_DEPLOY_PREDICT_ENDPOINT"]
    assert mapped == "/v2/models/ensemble/generate"
    answer = post(container.address, mapped, GENERATE)
    assert (answer.status, answer.json()["text_output"]) == (200, "SHELL"), answer.body


def test_a_container_answers_predict_and_health_itself(container: Container) -> None:
    assert get(container.address, "/health").status == 200
    answer = post(container.address, "/predict", GENERATE, {"Content-Type": "application/octet-stream"})
    assert (answer.status, answer.json()["text_output"]) == (200, "SHELL"), answer.body


def test_a_container_streams_where_it_is_asked_to(container: Container) -> None:
    answer = post(container.address, "/predictWithResponseStream", GENERATE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert json.loads(answer.body.removeprefix(b"data: "))["text_output"] == "SHELL"


def test_requests_of_the_dedicated_support_for_triton_are_answered(container: Container) -> None:
    """Where ``CONTAINER_TYPE`` is ``TRITON``, headers name the model and the platform makes this path of them."""
    answer = post(container.address, "/v2/models/ensemble/versions/1/infer", INFER)
    assert (answer.status, answer.json()["outputs"][0]["data"]) == (200, ["SHELL"]), answer.body


def test_terraform_uploads_the_archive_and_starts_the_image(written: Path, terraform: dict[str, Any]) -> None:
    model = resource(terraform, "oci_datascience_model")
    assert model["artifact_content_length"] == (written / "artifact.zip").stat().st_size
    assert model["display_name"] == "upper"
    details = block(resource(terraform, "oci_datascience_model_deployment"), "model_deployment_configuration_details")
    configuration = block(details, "environment_configuration_details")
    assert configuration["environment_configuration_type"] == "OCIR_CONTAINER"
    assert configuration["server_port"] == configuration["health_check_port"] == 9000
    # What the platform takes: fewer than 2048 bytes, names of fewer than 32 characters.
    assert len(" ".join(configuration["cmd"])) < 2048
    assert all(2 <= len(name) < 32 for name in configuration["environment_variables"])
    with (written / "terraform/variables.tf").open() as file:
        declared = {name for one in plain(hcl2.load(file)["variable"]) for name in one}
    used = {
        word.split(".")[1].strip(",)}]")
        for word in (written / "terraform/main.tf").read_text().split()
        if word.startswith("var.")
    }
    assert used and used <= declared


PLAIN = {"str": str, "int": int, "list[str]": list, "dict(str, str)": dict}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("CreateModelDeploymentDetails", ()),
        ("SingleModelDeploymentConfigurationDetails", ("model_deployment_configuration_details",)),
        ("OcirModelDeploymentEnvironmentConfigurationDetails",
         ("model_deployment_configuration_details", "environment_configuration_details")),
        ("ModelConfigurationDetails", ("model_deployment_configuration_details", "model_configuration_details")),
        ("InstanceConfiguration",
         ("model_deployment_configuration_details", "model_configuration_details", "instance_configuration")),
        ("FixedSizeScalingPolicy",
         ("model_deployment_configuration_details", "model_configuration_details", "scaling_policy")),
    ],
)  # fmt: skip
def test_terraform_sets_what_oracles_library_knows(terraform: dict[str, Any], kind: str, path: tuple[str, ...]) -> None:
    fields = OciTypes().fields(kind)
    found = resource(terraform, "oci_datascience_model_deployment")
    for name in path:
        found = block(found, name)
    given = {name: value for name, value in found.items() if name not in ("dynamic", "__comments__")}
    given |= {name: [{}] for one in found.get("dynamic", []) for name in one}
    assert given.keys() <= fields.keys()
    for name, value in given.items():
        if fields[name] in PLAIN and not str(value).startswith("${"):
            assert isinstance(value, PLAIN[fields[name]]), (name, value)


def test_the_image_starts_the_same_and_has_what_the_platform_asks_health_with(
    written: Path, terraform: dict[str, Any]
) -> None:
    file = written / "container/Containerfile"
    details = block(resource(terraform, "oci_datascience_model_deployment"), "model_deployment_configuration_details")
    (command,) = instructions(file, "CMD")
    assert json.loads(command) == block(details, "environment_configuration_details")["cmd"]
    assert instructions(file, "USER")[-1] == "65532:65532"
    assert "install --yes --no-install-recommends curl" in instructions(file, "RUN")[0]
    assert instructions(file, "EXPOSE") == ["9000"]


def test_the_request_that_is_written_fits_the_model(written: Path, container: Container) -> None:
    body = (written / "request.json").read_bytes()
    assert post(container.address, "/predict", body).json()["text_output"] == "WHAT IS A CONCH?"
