"""What is made of the words of Ray Serve and of the directory, and which addresses are tried."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from conch.deploy.ray.cluster import Deployed, _check_listens, _complete, _failure, _in_one_line, _words
from conch.deploy.ray.planning import DeploymentPlan
from conch.errors import Code, ConchError, unavailable
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
    assert _complete(Deployed([ingress()], records), plans, {"node"}) is complete
    assert not _complete(Deployed([ingress()], records), plans, {"node", "another"})


def test_failures_say_what_could_not_start() -> None:
    error = _failure({"b": "no weights", "ingress": "port 8000 is taken"}, "ignored")
    assert error.message == "cannot start a replica of 'b': no weights; the ingress: port 8000 is taken"
    assert error.code is Code.INVALID_ARG
    assert _failure({}, "b: no GPU").message == "Ray Serve cannot run the models: b: no GPU"


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
        (None, ""),
        (state(), ""),
        (state("is\n being deployed"), "is being deployed"),
        (state(a=("HEALTHY", "fine")), ""),
        (state("x", a=("HEALTHY", ""), b=("UPDATING", "waits\n  for 2 GPUs"), c=("UNHEALTHY", "")),
         "b: waits for 2 GPUs; c: unhealthy"),
    ],
)  # fmt: skip
def test_what_is_not_there_yet_is_said_in_one_line(said: Any, words: str) -> None:
    assert _words(said) == words


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "http://head:x", "ray://head"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConchError, match="is no address of a Ray cluster: give HOST:PORT") as raised:
        _check_listens(address)
    assert raised.value.code is Code.INVALID_ARG


def test_a_cluster_that_does_not_answer_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _check_listens(f"127.0.0.1:{port}")
        _check_listens(f"ray://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ConchError, match=f"no Ray cluster answers at {address}: ") as raised:
            _check_listens(address)
        assert raised.value.code is Code.UNAVAILABLE


def test_of_what_ray_raises_the_last_line_is_shown() -> None:
    with pytest.raises(ConchError, match=r"^Ray Serve: RuntimeError: it is so$"), _in_one_line():
        raise RuntimeError("Traceback\n  File x\n\nRuntimeError: it is so\n")
    with pytest.raises(ConchError, match=r"^Ray Serve: RuntimeError$"), _in_one_line():
        raise RuntimeError
    with pytest.raises(ConchError, match=r"^as it is$"), _in_one_line():
        raise unavailable("as it is")
