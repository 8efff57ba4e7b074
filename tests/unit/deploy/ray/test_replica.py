"""A replica from its start to its end, and what it registers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests

from conch.deploy.ray import replica as module
from conch.deploy.ray.registry import ReplicaRecord
from conch.deploy.ray.replica import ModelReplica, ReplicaSpec
from conch.deploy.ray.scaling import IN_FLIGHT
from conch.library.server import Server
from tests.events import until
from tests.models import build
from tests.unit.deploy.ray import fake_ray
from tests.unit.deploy.ray.fake_ray import Remote, made
from tests.unit.deploy.ray.servers import write_echo

#: Ray Serve awaits them; Python, which calls them here once more, does not.


@pytest.fixture
async def registry(monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr(module, "REGISTER_SECONDS", 0.01)
    fake_ray.install(monkeypatch)
    return Remote(await fake_ray.registry())


def work(repository: Path, *names: str, max_loaded_models: int = 0, **options: Any) -> ReplicaSpec:
    loads = () if max_loaded_models else names
    return ReplicaSpec("echo", "v1", (str(repository),), names, loads, max_loaded_models, 1, options)


async def generated(record: ReplicaRecord, name: str) -> tuple[int, Any]:
    url = f"{record.http}/v2/models/{name}/generate"
    response = await asyncio.to_thread(requests.post, url, json={"text_input": "hello"})
    return response.status_code, response.json()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_echo(tmp_path, "echo")
    write_echo(tmp_path, "other")
    return tmp_path


async def test_a_replica_announces_its_models_until_it_ends(repository: Path, registry: Remote) -> None:
    replica = await made(ModelReplica, work(repository, "echo"), registry)
    (record,) = await registry.target.replicas()
    assert (record.id, record.deployment, record.version, record.node) == ("deployment#1", "echo", "v1", "node")
    (model,) = record.models
    assert (model.name, model.versions, json.loads(model.config)["name"]) == ("echo", (1,), "echo")
    assert record.http.startswith("http://127.0.0.1:") and record.grpc.startswith("grpc://127.0.0.1:")
    await replica.check_health()
    assert await replica.record_autoscaling_stats() == {IN_FLIGHT: 0.0}
    assert (await generated(record, "echo"))[1]["OUT"] == "echo hello"
    said = len(registry.calls)
    await until(lambda: len(registry.calls) > said)
    await replica.__del__()
    assert await registry.target.replicas() == ()
    with pytest.raises(RuntimeError, match="the server has ended"):
        await replica.check_health()


async def test_a_replica_reports_its_class_names(tmp_path: Path, registry: Remote) -> None:
    repository = build(tmp_path / "models", "classify")
    replica = await made(ModelReplica, work(repository, "classify"), registry)
    (record,) = await registry.target.replicas()
    labels = (repository / "classify" / "labels.txt").read_text().splitlines()
    assert record.models[0].labels == (("OUTPUT", tuple(labels)),)
    await replica.__del__()


async def test_a_registry_that_does_not_answer_stops_no_replica(repository: Path, registry: Remote) -> None:
    replica = await made(ModelReplica, work(repository, "echo"), registry)
    (record,) = await registry.target.replicas()
    registry.away = True
    said = len(registry.calls)
    await until(lambda: len(registry.calls) > said + 1)
    registry.away = False
    await registry.target.deregister("somebody else")
    said = len(registry.calls)
    await until(lambda: len(registry.calls) > said)  # it says again that it is there
    registry.away = True
    await replica.__del__()
    with pytest.raises(requests.ConnectionError):
        await generated(record, "echo")


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [(("missing",), {}, "missing"), (("echo",), {"log_verbos": "1"}, "no option 'log_verbos': did you mean")],
)
async def test_a_replica_that_cannot_start_reports_why_and_leaves_nothing(
    repository: Path, registry: Remote, names: tuple[str, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RuntimeError, match=reason):
        await made(ModelReplica, work(repository, *names, **options), registry)
    assert reason in (await registry.target.failures())["echo"]
    assert await registry.target.replicas() == ()


async def test_a_replica_that_cannot_announce_itself_leaves_no_server(
    repository: Path, registry: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = []
    start = Server.start

    def noted(server: Server) -> Server:
        servers.append(server)
        return start(server)

    monkeypatch.setattr(Server, "start", noted)
    registry.away = True
    with pytest.raises(RuntimeError, match="actor died"):
        await made(ModelReplica, work(repository, "echo"), registry)
    assert not servers[0].live()
    assert object.__new__(ModelReplica).__del__() is None  # Ray Serve calls this also then


async def test_a_replica_that_many_models_share_loads_what_is_asked_for(repository: Path, registry: Remote) -> None:
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.py").write_text("raise RuntimeError('no weights')")
    names = ("echo", "other", "broken", "missing")
    replica = await made(ModelReplica, work(repository, *names, max_loaded_models=1), registry)
    (record,) = await registry.target.replicas()
    assert [(one.name, one.config, one.versions) for one in record.models] == [(name, "", ()) for name in names]
    for name in ("echo", "other"):
        assert (await generated(record, name))[1]["OUT"] == "echo hello"
        index = await asyncio.to_thread(requests.post, f"{record.http}/v2/repository/index", json={"ready": True})
        assert [model["name"] for model in index.json()] == [name]
    status, answer = await generated(record, "broken")
    assert (status, "no weights" in answer["error"]) == (503, True)
    assert (await generated(record, "missing"))[0] == 404
    await replica.__del__()
    assert replica.__del__() is None  # as Python calls it when the object is freed
