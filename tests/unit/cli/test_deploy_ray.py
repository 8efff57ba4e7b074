"""``conch deploy ray``: from its flags to what is deployed, what it refuses before, and what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conch.cli import main
from conch.cli.deploy_ray import ingress_urls
from conch.core.errors import ConchError, invalid, unavailable
from conch.deploy.ray.options import RayOptions
from conch.deploy.ray.planning import DeploymentPlan
from conch.deploy.ray.registry import IngressRecord, ReplicaRecord
from conch.options.settings import Settings
from tests.models import write


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path / "models", "echo", 'backend: "python"', {"1/model.py": "", "labels.txt": ""})
    write(tmp_path / "models", "other", 'backend: "python"', {"1/model.py": ""})
    return tmp_path / "models"


class Cluster:
    """Takes the place of :mod:`conch.deploy.ray.cluster`: notes what it is asked for."""

    def __init__(self) -> None:
        self.there = False
        self.alone = False
        self.resources = {"CPU": 64.0, "GPU": 64.0}
        self.asked: list[Any] = []
        self.deployed: list[tuple[RayOptions, Sequence[DeploymentPlan]]] = []
        self.removed = 0
        #: What waiting for the models raises.
        self.error: BaseException | None = None

    @contextmanager
    def connected(self, address: str, *, start: bool = True) -> Iterator[bool]:
        self.asked.append((address, start))
        yield self.alone

    def total_resources(self) -> dict[str, float]:
        return self.resources

    def start_serve(self) -> None:
        self.asked.append("serve")

    def RayApplication(self, name: str) -> Cluster:
        self.asked.append(name)
        return self

    @property
    def is_deployed(self) -> bool:
        return self.there

    def deploy(self, options: RayOptions, plans: Sequence[DeploymentPlan]) -> None:
        self.deployed.append((options, plans))

    def wait(self, plans: Sequence[DeploymentPlan], seconds: float, tell: Any) -> Any:
        tell("echo: pending")
        if self.error is not None:
            raise self.error
        addresses = {"metrics": ("10.0.0.1", 8002), "grpc": ("10.0.0.1", 8001), "http": ("10.0.0.1", 8000)}
        replicas = [
            ReplicaRecord(name, deployment, "1", 0, "node", "", "", ())
            for name, deployment in (("a", "other"), ("b", "echo"), ("c", "echo"))
        ]
        return SimpleNamespace(replicas=replicas, ingresses=[IngressRecord("i", "0123456789", addresses)])

    def remove(self) -> None:
        self.removed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "conch.deploy.ray.cluster", cluster)
    monkeypatch.setattr("conch.machine.extras.require", lambda *_, **__: None)
    return cluster


def run(repository: Path, *flags: str) -> int:
    return main(["deploy", "ray", f"--model-repository={repository}", "--detach", *flags])


def test_without_flags_it_deploys_all_models(
    repository: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(repository) == 0
    ((options, plans),) = cluster.deployed
    assert [plan.name for plan in plans] == ["echo", "other"]
    assert options == RayOptions(
        model_repository=(str(repository),),
        ingress_options={
            "http_address": "0.0.0.0",
            "grpc_address": "0.0.0.0",
            "http_port": 8000,
            "grpc_port": 8001,
            "metrics_port": 8002,
        },
    )
    assert cluster.asked == [("", True), "serve", "conch"]
    assert capsys.readouterr().out.splitlines() == [
        "echo: pending",
        "echo: 2 replicas",
        "other: 1 replica",
        "node 01234567: http://10.0.0.1:8000 grpc://10.0.0.1:8001 http://10.0.0.1:8002/metrics",
    ]


def test_flags_are_what_is_deployed(repository: Path, cluster: Cluster) -> None:
    flags = (
        "--models= other+echo, ", "--min-replicas=2", "--max-replicas=4", "--target-ongoing-requests=0.5",
        "--upscale-delay-secs=1", "--downscale-delay-secs=2", "--cpus-per-replica=0", "--gpus-per-replica=0.5",
        "--max-surge-percent=0", "--drain-secs=3", "--replica-option=--log-verbose=1",
        "--replica-option=backend_config=python,a=b=c", "--replica-option=backend_config=python,d=e",
        "--http-port=0", "--host=127.0.0.1", "--ingress-option=http_address=::1",
        "--address=head:6379", "--name=other name",
    )  # fmt: skip
    assert run(repository, *flags) == 0
    ((options, plans),) = cluster.deployed
    assert options == RayOptions(
        model_repository=(str(repository),), models=("other+echo",), min_replicas=2, max_replicas=4,
        target_ongoing_requests=0.5, upscale_delay_secs=1.0, downscale_delay_secs=2.0, cpus_per_replica=0.0,
        gpus_per_replica=0.5, max_surge_percent=0, drain_secs=3,
        replica_options={"log_verbose": "1", "backend_config": ("python,a=b=c", "python,d=e")},
        ingress_options={"http_address": "::1", "grpc_address": "127.0.0.1", "http_port": 0, "grpc_port": 8001,
                         "metrics_port": 8002},
    )  # fmt: skip
    assert [(plan.name, plan.loads) for plan in plans] == [("other", ("other", "echo"))]
    assert cluster.asked == [("head:6379", True), "serve", "other name"]


def test_a_repository_is_called_as_every_node_can_call_it(
    repository: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    assert run(Path("models")) == 0
    assert cluster.deployed[0][0].model_repository == (os.path.abspath("models"),)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-replicas=2", "--min-replicas=3"], "--max-replicas 2 is less than --min-replicas 3"),
        (["--replica-option=log_verbose"], "--replica-option log_verbose: write NAME=VALUE, such as log_verbose=1"),
        (["--ingress-option==1"], "--ingress-option =1: write NAME=VALUE"),
        (["--replica-option=log_verbos=1"], "no option 'log_verbos': did you mean 'log_verbose'?"),
        (["--ingress-option=log_verbose=much"], "log-verbose"),
        (["--replica-option=log_verbose=1", "--replica-option=log_verbose=2"], "log_verbose takes"),
        (["--replica-option=model_repository=x"], "conch deploy ray sets this option itself: use --model-repository"),
        (["--replica-option=model-control-mode=poll"], "sets this option itself (see --max-models-per-replica)"),
        (
            ["--replica-option=grpc_use_ssl=true"],
            "an ingress could not call such a replica; use --ingress-option grpc_use",
        ),
        (["--replica-option=http_use_ssl_mutual=true"], "an ingress could not call such a replica"),
        (["--ingress-option=allow_http=false"], "sets this option itself, and needs it"),
        (["--grpc-port=8000"], "--grpc-port 8000 is also the port of --http-port: choose another"),
        (["--name=ä"], "--name 'ä': the name must be ASCII, without '#' or '/', and not empty"),
        (["--name="], "--name '': the name must be"),
        (["--name=a/b"], "--name 'a/b': the name must be"),
        (["--models=none"], "there is no model 'none'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_before_anything_is_started(
    repository: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run(repository, *flags) == 1
    said = capsys.readouterr()
    assert words in said.err and len(said.err.splitlines()) == 1 and said.out == ""
    assert cluster.asked == []


def test_a_repository_must_be_named(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "ray"]) == 1
    assert "--model-repository must be specified" in capsys.readouterr().err


def test_a_cluster_that_ends_with_the_command_is_not_left(
    repository: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.alone = True
    assert run(repository) == 1
    assert "--detach needs a running cluster" in capsys.readouterr().err
    assert cluster.deployed == []


@pytest.mark.parametrize(("there", "removed"), [(False, 1), (True, 0)])
@pytest.mark.parametrize(
    "error", [invalid("cannot start a replica of 'echo'"), unavailable("the models do not answer")]
)
def test_what_cannot_start_is_removed_unless_something_served_before(
    repository: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str], there: bool, removed: int, error: ConchError
) -> None:
    cluster.there, cluster.error = there, error
    assert run(repository) == 1
    assert error.message in capsys.readouterr().err
    assert cluster.removed == removed


@pytest.mark.parametrize(("there", "removed"), [(False, 1), (True, 0)])
def test_ctrl_c_during_a_deployment_removes_it_only_if_it_is_new(
    repository: Path, cluster: Cluster, there: bool, removed: int
) -> None:
    cluster.there, cluster.error = there, KeyboardInterrupt()
    run(repository)
    assert cluster.removed == removed


def test_ctrl_c_removes_a_deployment_that_ends_with_the_command(repository: Path, cluster: Cluster) -> None:
    cluster.there, cluster.error = True, KeyboardInterrupt()
    assert main(["deploy", "ray", f"--model-repository={repository}"]) == 0
    assert cluster.removed == 1


@pytest.mark.parametrize("there", [True, False])
def test_what_was_deployed_is_removed_by_its_name(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    cluster.there = there
    assert main(["deploy", "ray", "--remove", "--name=mine"]) == (0 if there else 1)
    assert cluster.asked[0] == ("", False)  # it starts no cluster for this
    said = capsys.readouterr()
    assert (said.out, cluster.removed) == (("removed 'mine'\n", 1) if there else ("", 0))
    assert ("no application 'mine'" in said.err) is not there


@pytest.mark.parametrize("command", [["--model-repository={}"], ["--remove"]])
def test_without_ray_it_says_what_to_install(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("cluster", "application", "ingress"):
        monkeypatch.delitem(sys.modules, f"conch.deploy.ray.{name}", raising=False)
    assert main(["deploy", "ray", *(one.format(repository) for one in command)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "conch deploy ray needs" in line and "[ray]" in line


def test_urls_come_in_the_order_in_which_they_are_wanted() -> None:
    addresses = {kind: ("h", port) for port, kind in enumerate(("metrics", "openai", "grpc", "sagemaker", "http"))}
    listeners = Settings().listeners
    assert ingress_urls(addresses, listeners) == [
        "http://h:4", "grpc://h:2", "http://h:1", "http://h:3", "http://h:0/metrics",
    ]  # fmt: skip
    assert ingress_urls({"grpc": ("::1", 1)}, listeners) == ["grpc://[::1]:1"]
    assert ingress_urls({}, listeners) == []


def test_urls_of_an_encrypted_ingress_have_schemes_for_tls() -> None:
    addresses = {kind: ("h", port) for port, kind in enumerate(("http", "grpc", "openai", "metrics"))}
    listeners = Settings(http_use_ssl=True, grpc_use_ssl_mutual=True).listeners
    assert ingress_urls(addresses, listeners) == ["https://h:0", "grpcs://h:1", "https://h:2", "http://h:3/metrics"]


def test_models_that_do_not_fit_are_reported_before_they_are_deployed(
    repository: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.resources = {"CPU": 1.0}
    assert run(repository) == 0 and len(cluster.deployed) == 1, "a cluster may get more nodes"
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("2 replicas with 1 CPU each need 2, but the cluster has 1: ")
    cluster.alone = True
    assert main(["deploy", "ray", f"--model-repository={repository}"]) != 0
    assert "--cpus-per-replica 0.5" in capsys.readouterr().err
    assert len(cluster.deployed) == 1
