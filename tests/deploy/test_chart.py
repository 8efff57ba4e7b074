"""The Helm chart: what it renders is valid, and what it runs answers its probes and ends without losing a request."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from promql_parser import parse

from conch import __version__
from tests.conformance.raw import post, tensor
from tests.deploy.processes import ContainerProcess
from tests.deploy.registry import ROOT, run_helm
from tests.events import eventually
from tests.models import build, write

CHART = str(ROOT / "deploy/helm/conch")
MODELS = "modelRepository.existingClaim=models"
EVERYTHING = (
    MODELS, "autoscaling.enabled=true", "podMonitor.enabled=true", "gpus=2", "cache.existingClaim=hub",
    "modelRepository.subPath=main", "serviceAccount.name=server", "image.tag=v1", "args={--log-verbose=1}",
    "env[0].name=HF_TOKEN", "env[0].value=x", "imagePullSecrets[0].name=key", "nodeSelector.gpu=yes",
    "tolerations[0].key=gpu", "tolerations[0].operator=Exists", "podAnnotations.a=b", "podLabels.c=d",
    "podMonitor.labels.release=prometheus", "service.annotations.e=f",
)  # fmt: skip
WAITING = """
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not Path({go!r}).exists():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def settings(values: Sequence[str]) -> list[str]:
    """Helm's arguments that set these values."""
    return [part for value in values for part in ("--set", value)]


def render(*values: str) -> dict[str, Any]:
    """The resources by their kinds."""
    text = run_helm("template", "conch", CHART, *settings(values))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container(resources: dict[str, Any]) -> dict[str, Any]:
    (found,) = resources["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("values", [(MODELS,), EVERYTHING, ("modelRepository.volume.hostPath.path=/srv/models",)])
def test_lint_and_schemas_find_nothing(values: tuple[str, ...]) -> None:
    run_helm("lint", "--strict", CHART, *settings(values))
    for kind, resource in render(*values).items():
        if kind != "PodMonitor":  # of the Prometheus operator, not of Kubernetes
            kubernetes_validate.validate(resource, "1.34", strict=True)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load(Path(CHART, "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert container(render(MODELS))["image"] == f"conch:{__version__}"


def test_the_plain_manifests_are_the_chart_with_its_defaults() -> None:
    """``helm template conch deploy/helm/conch --set modelRepository.existingClaim=models`` regenerates them."""
    written = (ROOT / "deploy/kubernetes/conch.yaml").read_text()
    assert written == run_helm("template", "conch", CHART, "--set", MODELS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "where are the models? Set modelRepository.existingClaim to a claim, or modelRepository.volume"),
        ((MODELS, "replicas=2"), "additional properties 'replicas' not allowed"),
        ((MODELS, "autoscaling.metric=cpu"), "value must be one of 'pending-requests', 'queue-time'"),
        ((MODELS, "gpus=-1"), "minimum: got -1, want 0"),
        ((MODELS, "args={serve}"), "'serve' does not match pattern"),
    ],
)
def test_wrong_values_are_refused(values: tuple[str, ...], said: str) -> None:
    assert said in run_helm("template", "conch", CHART, *settings(values), fails=True)


def test_a_pod_may_write_only_into_its_volumes() -> None:
    resources = render(MODELS)
    pod = resources["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert container(resources)["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container(resources)["volumeMounts"]}
    assert mounts == {"/models": True, "/cache": False, "/tmp": False, "/dev/shm": False}


def test_kubernetes_waits_longer_than_a_stopping_server() -> None:
    resources = render(MODELS, "stopping.requestsSeconds=100", "stopping.finalizeSeconds=20", "stopping.waitSeconds=7")
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in container(resources)["args"])
    assert (flags["exit-timeout-secs"], flags["finalize-timeout-secs"]) == ("100", "20")
    assert container(resources)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    grace = resources["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 7 + 100 + 2 * 20


def test_the_container_answers_its_probes_and_drains(tmp_path: Path) -> None:
    resources = render(MODELS)
    go = tmp_path / "go"
    write(tmp_path / "models", "waiting", CONFIG, {"1/model.py": WAITING.format(go=str(go))})
    body = {"inputs": [tensor("X", "INT32", [1], [1])]}
    with ContainerProcess(container(resources)["args"], {"/models": tmp_path / "models"}, tmp_path / "log") as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = container(resources)[probe]["httpGet"]["path"]
            with urllib.request.urlopen(f"http://{server.http}{path}", timeout=60) as reply:
                assert reply.status == 200

        def ask() -> int:
            return post(server.http, "/v2/models/waiting/infer", body).status

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask) for _ in range(4)]
            eventually(lambda: pending(server.metrics) == 3, "requests that wait")
            assert server.process is not None
            server.process.terminate()
            eventually(lambda: not ready(server.http), "no readiness")
            go.touch()
            assert [one.result() for one in asked] == [200] * 4
        grace = resources["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert server.process.wait(grace) == 0


def pending(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("nv_inference_pending_request_count{")
    )


def ready(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{http}/v2/health/ready", timeout=60):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def test_the_autoscaler_counts_what_the_server_tells(tmp_path: Path) -> None:
    rules = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    with ContainerProcess(
        container(render(MODELS))["args"], {"/models": build(tmp_path / "models", "add_sub")}, tmp_path / "log"
    ) as server:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
            families = {line.split()[2] for line in page.read().decode().splitlines() if line.startswith("# TYPE ")}
    for rule in rules:
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'pod="a"').replace("<<.GroupBy>>", "pod")
        parse(query)
        parse(rule["seriesQuery"])
        named = {word for word in families if word in query}
        assert named and rule["seriesQuery"].partition("{")[0] in named
    known = {rule["name"]["as"] for rule in rules}
    asked = {
        render(MODELS, "autoscaling.enabled=true", f"autoscaling.metric={metric}")["HorizontalPodAutoscaler"]["spec"][
            "metrics"
        ][0]["pods"]["metric"]["name"]
        for metric in ("pending-requests", "queue-time")
    }
    assert asked == known
