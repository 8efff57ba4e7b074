"""The ingress of a node from its start to its end, and what it makes of the registry."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

import conch
from conch.deploy.ray import ingress as module
from conch.deploy.ray import registry as registry_module
from conch.deploy.ray.ingress import ClusterModel, IngressServer, IngressSpec, NodeIngress, cluster_models
from conch.deploy.ray.planning import INGRESS
from conch.deploy.ray.registry import IngressRecord, ReplicaRecord
from tests.events import until
from tests.unit.deploy.ray import fake_ray
from tests.unit.deploy.ray.fake_ray import Remote, made
from tests.unit.deploy.ray.records import ingress as fake_ingress
from tests.unit.deploy.ray.servers import record, serving, write_echo

#: Ray Serve awaits them; Python, which calls them here once more, does not.

FREE = {"http_port": 0, "grpc_port": 0, "allow_metrics": False, "http_address": "127.0.0.1", "grpc_address": "0.0.0.0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.Server]:
    repository = tmp_path_factory.mktemp("models")
    write_echo(repository)
    with serving(repository) as server:
        yield server


@pytest.fixture
async def registry(monkeypatch: pytest.MonkeyPatch) -> Remote:
    fake_ray.install(monkeypatch)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(registry_module, "WATCH_SECONDS", 0.01)
    return Remote(await fake_ray.registry())


@pytest.fixture
async def ingress(registry: Remote) -> AsyncIterator[NodeIngress]:
    ingress = await made(NodeIngress, IngressSpec(drain_seconds=1, options=dict(FREE)), registry)
    await ingress.reconfigure({"models": ["echo"]})
    yield ingress
    await ingress.__del__()


async def watching_ingress(registry: Remote) -> IngressRecord:
    """The ingress that watches the registry, once there is one."""
    async with asyncio.timeout(30):
        while not (ingresses := await registry.target.ingresses()):
            await asyncio.sleep(0.001)
    (record,) = ingresses
    return record


async def followed(registry: Remote) -> None:
    """Wait until the ingress follows the registry as it is now."""
    current = (await registry.target.watch(fake_ingress("another"), 0)).revision
    await registry.target.leave("another")
    await until(lambda: current in [arguments[1] for name, arguments in registry.calls if name == "watch"])


def server_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "conch-server"}


async def status(registry: Remote, path: str) -> int:
    """The status with which the ingress that watches the registry responds to a request for ``path``."""
    record = await watching_ingress(registry)
    host, port = record.addresses["http"]
    return (await asyncio.to_thread(requests.get, f"http://{host}:{port}{path}")).status_code


async def test_an_ingress_serves_what_replicas_announce(
    ingress: NodeIngress, registry: Remote, server: conch.Server
) -> None:
    assert await status(registry, "/v2/health/ready") == 400
    await registry.target.register(record("a", server, "echo"))
    while await status(registry, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    (known,) = await registry.target.ingresses()
    assert (known.id, known.node, sorted(known.addresses)) == ("deployment#1", "node", ["grpc", "http"])
    assert known.addresses["grpc"][0] == "127.0.0.1"  # in place of 0.0.0.0
    await ingress.reconfigure({"models": []})
    assert await status(registry, "/v2/models/echo/ready") == 400


async def test_an_ingress_continues_while_the_registry_is_away_and_starts_again(
    ingress: NodeIngress, registry: Remote, server: conch.Server
) -> None:
    await registry.target.register(record("a", server, "echo"))
    while await status(registry, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    registry.away = True
    asked = len(registry.calls)
    await until(lambda: len(registry.calls) > asked + 1)
    registry.target = await fake_ray.registry()
    registry.away = False
    await followed(registry)
    assert await status(registry, "/v2/models/echo/ready") == 200
    await registry.target.deregister("a")  # returns when the ingress has done so
    assert await status(registry, "/v2/models/echo/ready") == 400


async def test_a_replica_waits_until_an_ingress_has_done_what_it_failed_to_do(
    ingress: NodeIngress, registry: Remote, server: conch.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.target.register(record("a", server, "echo"))
    while await status(registry, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    tried: list[Mapping[str, ClusterModel]] = []
    follow = IngressServer.follow

    async def failing(front: IngressServer, found: Mapping[str, ClusterModel]) -> None:
        tried.append(found)
        if len(tried) < 3:
            raise OSError("No space left on device")
        await follow(front, found)

    monkeypatch.setattr(IngressServer, "follow", failing)
    await registry.target.deregister("a")
    assert len(tried) >= 3
    assert await status(registry, "/v2/models/echo/ready") == 400


async def test_an_ingress_that_ends_is_not_waited_for_and_leaves_nothing(
    registry: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = server_threads()
    ingress = await made(NodeIngress, IngressSpec(drain_seconds=1, options=dict(FREE)), registry)
    await watching_ingress(registry)
    await ingress.__del__()
    assert ingress.__del__() is None  # as Python calls it when the object is freed
    assert await registry.target.ingresses() == ()
    assert list(tmp_path.iterdir()) == []
    assert server_threads() == threads


async def test_an_ingress_ends_also_where_the_registry_is_away(registry: Remote) -> None:
    threads = server_threads()
    ingress = await made(NodeIngress, IngressSpec(drain_seconds=1, options=dict(FREE)), registry)
    registry.away = True
    await ingress.__del__()
    assert server_threads() == threads


@pytest.mark.parametrize("away", [False, True])
async def test_an_ingress_that_cannot_start_reports_why_and_leaves_nothing(
    registry: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    registry.away = away
    threads = server_threads()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options: dict[str, Any] = {**FREE, "http_port": taken.getsockname()[1]}
        with pytest.raises(RuntimeError, match="already in use"):
            await made(NodeIngress, IngressSpec(options=options), registry)
    with pytest.raises(RuntimeError, match="no option 'http_prt'"):
        await made(NodeIngress, IngressSpec(options={"http_prt": 1}), registry)
    failures = await registry.target.failures()
    assert failures == {} if away else "no option 'http_prt'" in failures[INGRESS]
    assert list(tmp_path.iterdir()) == []
    assert server_threads() == threads


async def test_models_are_read_again_only_when_replicas_change(
    ingress: NodeIngress, registry: Remote, server: conch.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(replicas: Sequence[ReplicaRecord]) -> dict[str, ClusterModel]:
        read.append(len(replicas))
        return cluster_models(replicas)

    monkeypatch.setattr(module, "cluster_models", counted)
    await registry.target.register(record("a", server, "echo"))
    while await status(registry, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    asked = len(registry.calls)
    await until(lambda: len(registry.calls) > asked + 3)
    await registry.target.register(record("b", server, "echo"))
    await followed(registry)
    assert read == [1, 2]
