"""What is made of the words of Ray Serve and of the registry, and which addresses are tried."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conch.core.errors import Code, ConchError, unavailable
from conch.deploy.ray import cluster as module
from conch.deploy.ray.cluster import (
    Deployed,
    RayApplication,
    check_address,
    connected,
    deployment_error,
    is_complete,
    logs_in_one_line,
    status_messages,
)
from conch.deploy.ray.planning import DeploymentPlan
from tests.unit.deploy.ray.records import ingress, replica


def plan(name: str, version: str) -> DeploymentPlan:
    return DeploymentPlan(name, (name,), (name,), version)


@pytest.mark.parametrize(
    ("replicas", "complete"),
    [
        ((("a", "1"), ("b", "2")), True),
        ((("a", "1"), ("a", "1"), ("b", "2")), True),
        ((("a", "1"),), False),
        ((("a", "1"), ("a", "0"), ("b", "2")), False),  # an old one still answers
        ((("a", "1"), ("b", "2"), ("gone", "1")), False),  # one of a model that is deployed no longer
        ((), False),
    ],
)
def test_all_is_there_when_every_deployment_has_replicas_of_its_version_alone(
    replicas: tuple[tuple[str, str], ...], complete: bool
) -> None:
    records = [replica(str(at), deployment=one, version=two) for at, (one, two) in enumerate(replicas)]
    plans = [plan("a", "1"), plan("b", "2")]
    assert is_complete(Deployed([ingress()], records), plans, {"node"}) is complete
    assert not is_complete(Deployed([ingress()], records), plans, {"node", "another"})


def test_deployment_error_names_what_could_not_start() -> None:
    error = deployment_error({"b": "no weights", "ingress": "port 8000 is taken"}, "ignored")
    assert error.message == "cannot start a replica of 'b': no weights; the ingress: port 8000 is taken"
    assert error.code is Code.INVALID_ARG
    assert deployment_error({}, "b: no GPU").message == "Ray Serve cannot run the models: b: no GPU"


def state(message: str = "", **deployments: tuple[str, str]) -> Any:
    found = {name: SimpleNamespace(status=Status(status), message=text) for name, (status, text) in deployments.items()}
    return SimpleNamespace(message=message, deployments=found)


class Status(str):
    """A status of Ray Serve's, which is an enum and a text."""

    @property
    def value(self) -> str:
        return str(self)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, []),
        (state(), []),
        (state("is\n being deployed"), ["is being deployed"]),
        (state(a=("HEALTHY", "fine")), []),
        (state("x", a=("HEALTHY", ""), b=("UPDATING", "waits\n  for 2 GPUs"), c=("UNHEALTHY", "")),
         ["b: waits for 2 GPUs", "c: unhealthy"]),
    ],
)  # fmt: skip
def test_missing_results_are_reported_in_one_line(said: Any, words: list[str]) -> None:
    assert status_messages(said) == words


@pytest.mark.parametrize(
    ("address", "running", "started"), [("", True, False), ("", False, True), ("local", True, True)]
)
def test_a_cluster_that_is_started_here_is_known_to_end(
    address: str, running: bool, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **options: Any) -> None:
        if address == "auto" and not running:
            raise ConnectionError("no cluster")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(module, "require", lambda *arguments, **options: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    with connected(address) as alone:
        assert alone is started


def test_a_removal_starts_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(module, "require", lambda *arguments, **options: None)
    ray = SimpleNamespace(init=lambda address, **options: started.append(address), shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for address, variable in (("local", ""), ("", "local")):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        with pytest.raises(ConchError, match="'local' starts a cluster") as raised, connected(address, start=False):
            pass
        assert raised.value.code is Code.INVALID_ARG
    assert started == []


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "http://head:x", "ray://head"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConchError, match="is not the address of a Ray cluster: pass the HOST:PORT") as raised:
        check_address(address)
    assert raised.value.code is Code.INVALID_ARG


def test_an_unreachable_cluster_is_reported_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
        check_address(f"ray://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ConchError, match=f"no Ray cluster responds at {address}: ") as raised:
            check_address(address)
        assert raised.value.code is Code.UNAVAILABLE


def test_of_what_ray_raises_the_last_line_is_shown() -> None:
    with pytest.raises(ConchError, match=r"^Ray Serve: RuntimeError: it is so$"), logs_in_one_line():
        raise RuntimeError("Traceback\n  File x\n\nRuntimeError: it is so\n")
    with pytest.raises(ConchError, match=r"^Ray Serve: RuntimeError$"), logs_in_one_line():
        raise RuntimeError
    with pytest.raises(ConchError, match=r"^as it is$"), logs_in_one_line():
        raise unavailable("as it is")


def test_removal_of_an_application_waits_however_long_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    left = iter([{"mine": 1, "other": 1}, {"mine": 1, "other": 1}, {"mine": 1, "other": 1}, {"other": 1}])
    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=next(left)),
        delete=lambda name, **given: asked.append((name, given)),
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.setattr(module, "POLL_SECONDS", 0)
    RayApplication("mine").remove()
    assert asked == [("mine", {"_blocking": False})]  # Ray Serve's own waiting raises after a minute
    assert next(left, None) is None
