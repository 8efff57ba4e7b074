"""The ingress of a node from its start to its end, and what it makes of what the directory says."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import conch
from conch.deploy.ray import directory as directory_module
from conch.deploy.ray import ingress as module
from conch.deploy.ray.front import IngressPlan, IngressServer
from conch.deploy.ray.ingress import INGRESS, NodeIngress
from conch.deploy.ray.listing import ReplicaRecord
from conch.deploy.ray.relay import HttpHead, RpcError
from conch.deploy.ray.remotes import ClusterModel, cluster_models
from tests.unit.deploy.ray import fake_ray
from tests.unit.deploy.ray.fake_ray import Remote, made
from tests.unit.deploy.ray.records import until
from tests.unit.deploy.ray.servers import record, serving, write_echo

#: Ray Serve awaits them; Python, which calls them here once more, does not.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__. was never awaited")

FREE = {"http_port": 0, "grpc_port": 0, "allow_metrics": False, "http_address": "127.0.0.1", "grpc_address": "0.0.0.0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.Server]:
    repository = tmp_path_factory.mktemp("models")
    write_echo(repository)
    with serving(repository) as server:
        yield server


@pytest.fixture
async def directory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Remote]:
    fake_ray.install(monkeypatch)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(directory_module, "WATCH_SECONDS", 0.01)
    found = Remote(await fake_ray.directory())
    yield found
    found.target._looking.cancel()


@pytest.fixture
async def ingress(directory: Remote) -> AsyncIterator[NodeIngress]:
    ingress = await made(NodeIngress, IngressPlan(drain_seconds=1, options=dict(FREE)), directory)
    await ingress.reconfigure({"models": ["echo"]})
    yield ingress
    await ingress.__del__()


async def status(ingress: NodeIngress, target: str) -> int:
    parts = [part async for part in ingress.http("GET", target, (), b"")]
    assert isinstance(parts[0], HttpHead)
    return parts[0].status


async def test_an_ingress_serves_what_replicas_announce(
    ingress: NodeIngress, directory: Remote, server: conch.Server
) -> None:
    assert await status(ingress, "/v2/health/ready") == 400
    await directory.target.announce(record("a", server, "echo"))
    while await status(ingress, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    (known,) = await directory.target.ingresses()
    assert (known.id, known.node, sorted(known.addresses)) == ("deployment#1", "node", ["grpc", "http"])
    assert known.addresses["grpc"][0] == "127.0.0.1"  # in place of 0.0.0.0
    assert isinstance(await ingress.rpc("ServerReady", b"", ()), bytes)
    failed = await ingress.rpc("ModelMetadata", b"\n\x04none", ())
    assert isinstance(failed, RpcError) and failed.code == "NOT_FOUND"
    assert len([answer async for answer in ingress.rpc_stream("ModelStreamInfer", b"\n\x04none", ())]) == 1
    await ingress.reconfigure({"models": []})
    assert await status(ingress, "/v2/models/echo/ready") == 400


async def test_an_ingress_goes_on_while_the_directory_is_away_and_starts_again(
    ingress: NodeIngress, directory: Remote, server: conch.Server
) -> None:
    await directory.target.announce(record("a", server, "echo"))
    while await status(ingress, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    directory.away = True
    asked = len(directory.calls)
    await until(lambda: len(directory.calls) > asked + 1)
    before, directory.target = directory.target, await fake_ray.directory()
    before._looking.cancel()
    directory.away = False
    known = directory.target._listing.revision
    await until(lambda: ingress._done == known)
    assert await status(ingress, "/v2/models/echo/ready") == 200
    await directory.target.withdraw("a")  # returns when the ingress has done so
    assert await status(ingress, "/v2/models/echo/ready") == 400


async def test_a_replica_waits_until_an_ingress_has_done_what_it_failed_to_do(
    ingress: NodeIngress, directory: Remote, server: conch.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.target.announce(record("a", server, "echo"))
    while await status(ingress, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    tried: list[Mapping[str, ClusterModel]] = []
    follow = IngressServer.follow

    async def failing(front: IngressServer, found: Mapping[str, ClusterModel]) -> None:
        tried.append(found)
        if len(tried) < 3:
            raise OSError("No space left on device")
        await follow(front, found)

    monkeypatch.setattr(IngressServer, "follow", failing)
    await directory.target.withdraw("a")
    assert len(tried) >= 3
    assert await status(ingress, "/v2/models/echo/ready") == 400


async def test_an_ingress_that_ends_is_not_waited_for_and_leaves_nothing(
    directory: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ingress = await made(NodeIngress, IngressPlan(drain_seconds=1, options=dict(FREE)), directory)
    await until(lambda: bool(directory.target._watchers))
    await ingress.__del__()
    assert await directory.target.ingresses() == ()
    assert list(tmp_path.iterdir()) == []
    assert not ingress._thread._thread.is_alive()


async def test_an_ingress_ends_also_where_the_directory_is_away(directory: Remote) -> None:
    ingress = await made(NodeIngress, IngressPlan(drain_seconds=1, options=dict(FREE)), directory)
    directory.away = True
    await ingress.__del__()
    assert not ingress._thread._thread.is_alive()


@pytest.mark.parametrize("away", [False, True])
async def test_an_ingress_that_cannot_start_says_why_and_leaves_nothing(
    directory: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory.away = away
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options: dict[str, Any] = {**FREE, "http_port": taken.getsockname()[1]}
        with pytest.raises(RuntimeError, match="already in use"):
            await made(NodeIngress, IngressPlan(options=options), directory)
    with pytest.raises(RuntimeError, match="no option 'http_prt'"):
        await made(NodeIngress, IngressPlan(options={"http_prt": 1}), directory)
    failures = await directory.target.failures()
    assert failures == {} if away else "no option 'http_prt'" in failures[INGRESS]
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in threading.enumerate()[threads:] if one.name == "conch-server"]


async def test_models_are_not_read_anew_where_the_directory_has_no_news(
    ingress: NodeIngress, directory: Remote, server: conch.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(replicas: Sequence[ReplicaRecord]) -> dict[str, ClusterModel]:
        read.append(len(replicas))
        return cluster_models(replicas)

    monkeypatch.setattr(module, "cluster_models", counted)
    await directory.target.announce(record("a", server, "echo"))
    while await status(ingress, "/v2/health/ready") != 200:
        await asyncio.sleep(0.01)
    asked = len(directory.calls)
    await until(lambda: len(directory.calls) > asked + 3)
    await directory.target.announce(record("b", server, "echo"))
    await until(lambda: ingress._done == directory.target._listing.revision)
    assert read == [1, 2]
