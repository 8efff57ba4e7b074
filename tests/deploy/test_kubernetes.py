"""``conch deploy kubernetes``: valid manifests, the same pods as the chart, and a server that its arguments start."""

from __future__ import annotations

import json
import re
import shlex
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import kubernetes_validate
import pytest
import yaml

from conch import __version__
from conch.cli import main
from tests.conformance.raw import Request, get, send
from tests.deploy.clouds import MODEL, PREPROCESSING, repository
from tests.deploy.processes import ContainerProcess
from tests.deploy.registry import ROOT, run_helm
from tests.models import write

#: Kinds of Kubernetes itself; the schemas of others come with their operators.
OWN = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "Secret", "Ingress", "ConfigMap"}


def deploy(models: Path, out: Path, *options: str, status: int = 0) -> Path:
    command = ["deploy", "kubernetes", "--model-repository", str(models), "--output", str(out), *options]
    assert main(command) == status
    return out


def objects(folder: Path) -> dict[str, Any]:
    """The objects of all files that kustomization.yaml lists, by kind."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return {
        document["kind"]: document for file in listed for document in yaml.safe_load_all((folder / file).read_text())
    }


def container(found: dict[str, Any]) -> dict[str, Any]:
    (only,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("kubernetes") / "models")


@pytest.fixture(scope="module")
def measured(models: Path) -> Path:
    """What is written with the memory that the models have here."""
    return deploy(models, models.parent / "measured")


def given(models: Path, out: Path, *options: str) -> dict[str, Any]:
    return objects(deploy(models, out, "--memory=3GiB", *options))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--host=models.example.com", "--replicas=3", "--cpus=8", "--gpus=1"),
        ("--host=models.example.com", "--gateway=public"),
        ("--location=s3://bucket/models", "--name=search", "--image=registry.example/conch:v1"),
    ],
)
def test_manifests_follow_the_schemas(models: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    found = given(models, tmp_path / "out", *options)
    for kind in found.keys() & OWN:
        kubernetes_validate.validate(found[kind], "1.34", strict=True)
    assert found.keys() - OWN <= {"PodMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute"}
    names = {
        document["metadata"]["name"].removesuffix("-keys").removesuffix("-dashboard") for document in found.values()
    }
    assert names == {"search" if "--name=search" in options else "conch"}


def test_the_pods_are_those_of_the_chart(models: Path, tmp_path: Path) -> None:
    found = given(models, tmp_path / "out", "--cpus=2")
    text = run_helm(
        "template", "conch", str(ROOT / "deploy/helm/conch"), "--set", "modelRepository.existingClaim=models"
    )
    chart = {document["kind"]: document for document in yaml.safe_load_all(text)}
    ours, theirs = container(found), container(chart)
    for field in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext"):
        assert ours[field] == theirs[field], field
    assert [part for part in ours["args"] if part in theirs["args"]] == theirs["args"]
    assert [mount for mount in ours["volumeMounts"] if mount["name"] != "keys"] == theirs["volumeMounts"]
    pods = [resources["Deployment"]["spec"]["template"]["spec"] for resources in (found, chart)]
    for field in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert pods[0][field] == pods[1][field], field
    assert [volume for volume in pods[0]["volumes"] if volume["name"] != "keys"] == pods[1]["volumes"]
    assert found["Service"]["spec"] == chart["Service"]["spec"]
    for resources in (found, chart):
        sizes = container(resources)["resources"]
        assert sizes["limits"]["cpu"] == sizes["requests"]["cpu"], "engines have as many threads as the limit"
    assert theirs["image"] == ours["image"] == f"conch:{__version__}"


def test_the_memory_is_that_of_the_loaded_models_with_headroom(measured: Path) -> None:
    sizes = container(objects(measured))["resources"]
    request, limit = (int(sizes[kind]["memory"].removesuffix("Mi")) for kind in ("requests", "limits"))
    server, loaded = map(
        int, re.findall(r"used (\d+) MiB and the models (\d+) MiB", (measured / "README.md").read_text())[0]
    )
    assert server > 30 and loaded > 10
    assert server + loaded < request < limit < 4 * (server + loaded) + 1024


def test_the_server_of_the_manifests_asks_for_the_key_of_the_secret(
    models: Path, measured: Path, tmp_path: Path
) -> None:
    found = objects(measured)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "keys").write_text(found["Secret"]["stringData"]["keys"])
    key = found["Secret"]["stringData"]["keys"].strip().removeprefix("default=")
    with ContainerProcess(
        container(found)["args"], {"/models": models, "/etc/conch": keys}, tmp_path / "log"
    ) as server:
        assert get(server.http, "/v2/models/ensemble").status == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert send(server.http, Request("GET", "/v2/models/ensemble", headers=headers)).status == 200
        assert get(server.metrics, "/metrics").status == 200
    lines = (tmp_path / "log").read_text().splitlines()
    assert {json.loads(line)["level"] for line in lines} >= {"INFO"}
    assert stat.S_IMODE((measured / "secret.yaml").stat().st_mode) == 0o600


def test_monitoring_selects_the_pods_and_has_the_rules_and_the_dashboard(models: Path, tmp_path: Path) -> None:
    found = given(models, tmp_path / "out")
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("PodMonitor", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert found["PrometheusRule"]["spec"] == yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text())
    assert (
        found["ConfigMap"]["data"]["conch.json"].strip()
        == (ROOT / "deploy/monitoring/dashboard.json").read_text().strip()
    )


def test_the_network_is_open_as_far_as_needed(models: Path, tmp_path: Path) -> None:
    closed = given(models, tmp_path / "closed")["NetworkPolicy"]["spec"]
    assert closed["egress"] == [] and "Ingress" not in given(models, tmp_path / "again")
    assert [len(rule["from"]) for rule in closed["ingress"]] == [1, 1]
    opened = given(models, tmp_path / "open", "--location=s3://bucket/models", "--host=a.example.com")
    assert {port["port"] for port in opened["NetworkPolicy"]["spec"]["egress"][0]["ports"]} == {53, 443}
    assert len(opened["NetworkPolicy"]["spec"]["ingress"][0]["from"]) == 2
    assert container(opened)["args"][0] == "--model-repository=s3://bucket/models"
    assert "models" not in {volume["name"] for volume in opened["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert opened["Ingress"]["spec"]["rules"][0]["host"] == "a.example.com"


def test_values_that_look_like_other_types_are_texts(models: Path, tmp_path: Path) -> None:
    found = given(models, tmp_path / "out", "--image=123", "--host=1.5", "--location=1e3")
    assert (container(found)["image"], container(found)["args"][0]) == ("123", "--model-repository=1e3")
    assert found["Ingress"]["spec"]["rules"][0]["host"] == "1.5"


@pytest.mark.parametrize("name", ["a\n- b: {", "- 'a\"", "$(id)", "`id`", "@{name}", "null", "a: #b"])
def test_names_of_models_are_neither_yaml_nor_shell(tmp_path: Path, name: str) -> None:
    write(tmp_path / "models", name, PREPROCESSING, {"1/model.py": MODEL})
    out = deploy(tmp_path / "models", tmp_path / "out", "--memory=1GiB")
    expected = deploy(repository(tmp_path / "usual"), tmp_path / "other", "--memory=1GiB")
    assert (out / "server.yaml").read_text() == (expected / "server.yaml").read_text()
    (command,) = [line for line in (out / "README.md").read_text().splitlines() if "curl" in line]
    word = command.split()[1]
    assert shlex.split(word) == [word] and not set(word) & set("$`;&|")
    assert unquote(word) == f"localhost:8000/v2/models/{name}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name=Conch",), "--name must be lower-case letters"),
        (("--gateway=public",), "--gateway needs --host"),
        (("--host=a b",), "--host must be a host name"),
        (("--memory=much",), "--memory must be a size, such as 4GiB; got 'much'"),
        (("--api-key-file=/none",), "--api-key-file: /none cannot be read"),
        (("--image=a b",), "--image must be letters, digits and the signs"),
        (("--image=@conch",), "--image must be letters, digits and the signs"),
        (("--location=s3://bucket/a\n- --debug",), "--location must be letters, digits and the signs"),
        (("--name=null",), "--name must be a name that YAML reads as a text; got 'null'"),
        (("--claim=on",), "--claim must be a name that YAML reads as a text"),
        (("--monitoring-namespace=a}\n  x: y",), "--monitoring-namespace must be lower-case letters"),
        (("--monitoring-namespace=",), "--monitoring-namespace must be lower-case letters"),
        (("--host=a.example.com", "--ingress-namespace=a: b"), "--ingress-namespace must be lower-case letters"),
    ],
)
def test_values_that_kubernetes_would_refuse_are_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    more = () if options[0].startswith("--memory") else ("--memory=1GiB",)
    deploy(models, tmp_path / "out", *more, *options, status=1)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
