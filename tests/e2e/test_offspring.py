"""Processes that a model started end with its worker, however it ends, unless they left its process group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.conformance.raw import Reply, post, tensor
from tests.e2e.conftest import Serve
from tests.e2e.processes import alive, workers
from tests.events import eventually
from tests.servers import ConchServer

FLAGS = ("--model-control-mode=explicit", "--load-model=starter")


def ask(server: ConchServer, how: str) -> Reply:
    return post(server.http, "/v2/models/starter/infer", {"inputs": [tensor("HOW", "BYTES", [how], [1])]})


def unload(server: ConchServer) -> None:
    assert post(server.http, "/v2/repository/models/starter/unload").status == 200


def crash(server: ConchServer) -> None:
    assert ask(server, "die").status == 500


def kill_worker(server: ConchServer) -> None:
    worker, *_ = workers(server)  # and its fork
    worker.kill()


def terminate(server: ConchServer) -> None:
    server.stop()


def kill_server(server: ConchServer) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


@pytest.fixture
def left() -> Iterator[list[psutil.Process]]:
    """Processes to be ended after the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [unload, crash, kill_worker, terminate, kill_server])
@pytest.mark.parametrize("shared", ["60", "0"])
def test_what_a_model_started_ends_with_its_worker(
    serve: Serve, end: Callable[[ConchServer], None], shared: str, left: list[psutil.Process]
) -> None:
    server = serve("e2e/starter", flags=(*FLAGS, f"--worker-template-secs={shared}"))
    started = [psutil.Process(pid) for pid in ask(server, "live").json()["outputs"][0]["data"]]
    left += started
    assert all(alive(process) for process in started)
    end(server)
    eventually(lambda: not any(alive(process) for process in started[:2]), "the end of what it started")
    assert alive(started[2])
