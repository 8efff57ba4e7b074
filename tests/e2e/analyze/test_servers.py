"""Servers that load one configuration after the other: one that is started, and one that runs already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conch.core.errors import Code, ConchError
from conch.measure.analyze.servers import ControlClient, LocalServer, RemoteServer, ServerGone
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.resources import find_server
from conch.repository.scan import ModelRepository
from tests.e2e.analyze import models
from tests.oracle import OracleUnavailable, install
from tests.oracle.run import TritonServer
from tests.servers import ConchServer

TWO = {"waits": {"instance_group": [{"count": 2}]}}
PATIENCE = 60.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    return ModelRepository([models.write(tmp_path_factory.mktemp("models"))])


@pytest.fixture(scope="module")
def local(repository: ModelRepository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer(repository, ["both"], tmp_path_factory.mktemp("log") / "server.log") as server:
        yield server


def test_a_candidate_is_served_and_the_next_one_takes_its_place(local: LocalServer) -> None:
    changed = local.load(TWO)
    default = local.load({})

    assert list(changed) == ["waits", "both"]
    assert [one["waits"]["instance_group"][0]["count"] for one in (changed, default)] == [2, 1]


def test_a_repository_is_only_read(local: LocalServer, repository: ModelRepository) -> None:
    local.load(TWO)

    assert (repository.directory("waits") / "config.pbtxt").read_text() == models.CONFIG


def test_why_a_configuration_does_not_load_is_reported_with_the_users_paths(
    local: LocalServer, repository: ModelRepository
) -> None:
    with pytest.raises(ConchError, match="8 does not fit") as caught:
        local.load({"waits": {"max_batch_size": 8}})

    assert str(repository.directory("waits")) in caught.value.message


def test_a_server_that_died_is_started_again(local: LocalServer) -> None:
    pids = find_server(local.address).pids
    [process] = [child for child in psutil.Process().children() if child.pid in pids]
    process.kill()
    process.wait()

    with pytest.raises(ServerGone, match="has ended"):
        local.load({})
    local.restart()
    assert local.load(TWO)["waits"]["instance_group"][0]["count"] == 2


def test_a_server_ends_with_an_analysis_that_is_killed(repository: ModelRepository, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from conch.measure.analyze.servers import LocalServer;"
        "from conch.repository.scan import ModelRepository;"
        "server = LocalServer(ModelRepository([Path(sys.argv[1])]), ['waits'], Path(sys.argv[2]));"
        "server.load({}); print('loaded', flush=True); sys.stdin.read()"
    )
    analysis = subprocess.Popen(
        [sys.executable, "-c", program, str(repository.paths[0]), str(tmp_path / "log")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert analysis.stdout is not None and analysis.stdin is not None
    assert analysis.stdout.readline() == "loaded\n"
    started = psutil.Process(analysis.pid).children(recursive=True)

    os.kill(analysis.pid, signal.SIGKILL)
    analysis.communicate()

    _, alive = psutil.wait_procs(started, timeout=60)
    assert len(started) > 2 and alive == []


@pytest.fixture(scope="module", params=["conch", pytest.param("triton", marks=pytest.mark.slow)])
def running(request: pytest.FixtureRequest, repository: ModelRepository) -> Iterator[ConchServer | TritonServer]:
    flags = ("--model-control-mode=explicit", "--load-model=waits")
    if request.param == "conch":
        with ConchServer(repository.paths[0], *flags) as conch:
            yield conch
        return
    try:
        install()
    except OracleUnavailable as error:
        pytest.skip(f"the real Triton is not available here: {error}")
    with TritonServer(repository.paths[0], *flags) as triton:
        yield triton


def controls(server: ConchServer | TritonServer) -> list[ControlClient]:
    return [ControlClient(address(server.http), PATIENCE), ControlClient(address(server.grpc), PATIENCE, grpc=True)]


def address(text: str) -> Address:
    host, _, port = text.partition(":")
    return Address(host, int(port))


def test_a_running_server_loads_candidates_and_is_left_as_it_was(running: ConchServer | TritonServer) -> None:
    for control in controls(running):
        before = control.config("waits")
        with RemoteServer(control, address(running.http), ["both"]) as server:
            changed = server.load({**TWO, "both": {"max_batch_size": 1}})
            with pytest.raises(ConchError, match="8 does not fit"):
                server.load({"waits": {"max_batch_size": 8}})

        assert changed["waits"]["instance_group"][0]["count"] == 2
        assert changed["both"]["max_batch_size"] == 1
        assert control.ready() == {"waits"}
        assert control.config("waits") == before


def test_a_model_that_a_running_server_has_not_got_is_named(running: ConchServer | TritonServer) -> None:
    for control in controls(running):
        with pytest.raises(ConchError, match="no model 'nothing' in its repository; it has both, waits"):
            RemoteServer(control, address(running.http), ["nothing"])


def test_a_server_in_another_mode_is_distinguished(repository: ModelRepository) -> None:
    with ConchServer(repository.paths[0]) as server:
        for control in controls(server):
            with pytest.raises(ConchError, match="start it with --model-control-mode=explicit") as caught:
                RemoteServer(control, address(server.http), ["waits"])
            assert caught.value.code is Code.UNAVAILABLE
    for control in controls(server):
        with pytest.raises(ServerGone, match="no server responds"):
            control.ready()
