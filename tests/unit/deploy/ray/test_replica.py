"""A replica from its start to its end, and what it tells the directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conch.deploy.ray import replica as module
from conch.deploy.ray.directory import ReplicaDirectory
from conch.deploy.ray.pool import pool_class
from conch.deploy.ray.relay import HttpHead
from conch.deploy.ray.replica import ModelReplica, ReplicaWork
from conch.deploy.ray.scaling import UNDER_WAY
from conch.library.server import Server
from tests.models import build
from tests.unit.deploy.ray import fake_ray
from tests.unit.deploy.ray.fake_ray import FakeServe, Remote, made
from tests.unit.deploy.ray.records import until
from tests.unit.deploy.ray.servers import write_echo

#: Ray Serve awaits them; Python, which calls them here once more, does not.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__. was never awaited")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    monkeypatch.setattr(module, "ANNOUNCE_SECONDS", 0.01)
    return fake_ray.install(monkeypatch)


@pytest.fixture
async def directory(serve: FakeServe) -> AsyncIterator[Remote]:
    found: ReplicaDirectory = await fake_ray.directory()
    yield Remote(found)
    found._looking.cancel()


def work(repository: Path, *names: str, most_loaded: int = 0, **options: Any) -> ReplicaWork:
    loads = () if most_loaded else names
    return ReplicaWork("echo", "v1", (str(repository),), names, loads, most_loaded, 1, options)


async def generated(replica: ModelReplica, name: str) -> tuple[int, Any]:
    body = b'{"text_input": "hello"}'
    parts = [part async for part in replica.http("POST", f"/v2/models/{name}/generate", (), body)]
    assert isinstance(parts[0], HttpHead)
    return parts[0].status, json.loads(b"".join(part for part in parts[1:] if isinstance(part, bytes)))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_echo(tmp_path, "echo")
    write_echo(tmp_path, "other")
    return tmp_path


async def test_a_replica_says_what_it_serves_until_it_ends(repository: Path, directory: Remote) -> None:
    replica = await made(ModelReplica, work(repository, "echo"), directory)
    (record,) = await directory.target.replicas()
    assert (record.id, record.deployment, record.version, record.node) == ("deployment#1", "echo", "v1", "node")
    (model,) = record.models
    assert (model.name, model.versions, json.loads(model.config)["name"]) == ("echo", (1,), "echo")
    assert record.http.startswith("http://127.0.0.1:") and record.grpc.startswith("grpc://127.0.0.1:")
    await replica.check_health()
    assert await replica.record_autoscaling_stats() == {UNDER_WAY: 0.0}
    assert (await generated(replica, "echo"))[1]["OUT"] == "echo hello"
    said = len(directory.calls)
    await until(lambda: len(directory.calls) > said)
    await replica.__del__()
    assert await directory.target.replicas() == ()
    with pytest.raises(RuntimeError, match="the server has ended"):
        await replica.check_health()


async def test_a_replica_says_what_its_classes_are_called(tmp_path: Path, directory: Remote) -> None:
    repository = build(tmp_path / "models", "classify")
    replica = await made(ModelReplica, work(repository, "classify"), directory)
    (record,) = await directory.target.replicas()
    labels = (repository / "classify" / "labels.txt").read_text().splitlines()
    assert record.models[0].labels == (("OUTPUT", tuple(labels)),)
    await replica.__del__()


async def test_a_directory_that_does_not_answer_stops_no_replica(repository: Path, directory: Remote) -> None:
    replica = await made(ModelReplica, work(repository, "echo"), directory)
    directory.away = True
    said = len(directory.calls)
    await until(lambda: len(directory.calls) > said + 1)
    directory.away = False
    await directory.target.withdraw("somebody else")
    said = len(directory.calls)
    await until(lambda: len(directory.calls) > said)  # it says again that it is there
    directory.away = True
    await replica.__del__()
    assert not replica._server.live()


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [(("missing",), {}, "missing"), (("echo",), {"log_verbos": "1"}, "no option 'log_verbos': did you mean")],
)
async def test_a_replica_that_cannot_start_says_why_and_leaves_nothing(
    repository: Path, directory: Remote, names: tuple[str, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RuntimeError, match=reason):
        await made(ModelReplica, work(repository, *names, **options), directory)
    assert reason in (await directory.target.failures())["echo"]
    assert await directory.target.replicas() == ()


async def test_a_replica_that_cannot_announce_itself_leaves_no_server(
    repository: Path, directory: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = []
    start = Server.start

    def noted(server: Server) -> Server:
        servers.append(server)
        return start(server)

    monkeypatch.setattr(Server, "start", noted)
    directory.away = True
    with pytest.raises(RuntimeError, match="actor died"):
        await made(ModelReplica, work(repository, "echo"), directory)
    assert not servers[0].live()
    half_made = object.__new__(ModelReplica)
    await half_made.__del__()  # Ray Serve calls this also then


async def test_a_replica_that_many_models_share_loads_what_is_asked_for(
    repository: Path, directory: Remote, serve: FakeServe
) -> None:
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.py").write_text("raise RuntimeError('no weights')")
    names = ("echo", "other", "broken", "missing")
    replica = await made(pool_class(1), work(repository, *names, most_loaded=1), directory)
    assert serve.most == 1
    (record,) = await directory.target.replicas()
    assert [(one.name, one.config, one.versions) for one in record.models] == [(name, "", ()) for name in names]
    serve.model = "echo"
    assert (await generated(replica, "echo"))[1]["OUT"] == "echo hello"
    held = await replica.hold("other")
    assert await asyncio.to_thread(loaded, replica) == ["other"]
    await held.__del__()
    assert await asyncio.to_thread(loaded, replica) == []
    await held.__del__()  # also one that is gone
    serve.model = "broken"
    status, answer = await generated(replica, "broken")
    assert (status, "no weights" in answer["error"]) == (503, True)
    serve.model = "missing"
    assert (await generated(replica, "missing"))[0] == 404
    await replica.__del__()
    await held.__del__()


def loaded(replica: ModelReplica) -> list[str]:
    return [one["name"] for one in replica._server.models() if one.get("state") == "READY"]
