"""A worker that dies fails only what it ran; an unloaded model's worker is gone; no process outlives the server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conformance.conftest import pass_gate, wait_for_pending
from tests.conformance.raw import Reply, get, post, tensor
from tests.e2e.conftest import Serve
from tests.e2e.processes import alive, workers
from tests.events import Events, eventually
from tests.servers import ConchServer

Background = Callable[..., Future[Any]]


def crash(server: ConchServer, how: str) -> Reply:
    return post(server.http, "/v2/models/crash/infer", {"inputs": [tensor("HOW", "BYTES", [how], [1, 1])]})


def pid(server: ConchServer) -> int:
    reply = crash(server, "not at all")
    assert reply.status == 200, reply.body
    found: int = reply.json()["outputs"][0]["data"][0]
    return found


def answers(server: ConchServer) -> bool:
    return crash(server, "not at all").status == 200


@pytest.mark.parametrize(("how", "reason"), [("exit", "exit"), ("kill", "sigkill"), ("abort", "signal")])
def test_worker_dies_while_running(serve: Serve, how: str, reason: str) -> None:
    server = serve("e2e/crash", "identity_fp32")
    before = pid(server)
    reply = crash(server, how)
    assert (reply.status, reply.error) == (500, "Stub process 'crash_0' is not healthy.")
    body = {"inputs": [tensor("INPUT", "FP32", [1.5])]}
    assert post(server.http, "/v2/models/identity_fp32/infer", body).status == 200
    eventually(lambda: get(server.http, "/v2/models/crash/ready").status == 200, "coming back")
    eventually(lambda: answers(server), "answering again")
    assert pid(server) != before
    page = get(server.metrics, "/metrics").body.decode()
    pattern = r'^conch_worker_restarts_total{model="crash",reason="(\w+)",version="1"} 1$'
    assert re.findall(pattern, page, re.MULTILINE) == [reason]


def test_sys_exit_in_execute_is_an_error_or_a_restart(serve: Serve) -> None:
    server = serve("e2e/crash")
    assert crash(server, "sys_exit").status == 500
    eventually(lambda: answers(server), "answering again")


def test_killed_worker_fails_only_what_it_ran(serve: Serve, events: Events, background: Background) -> None:
    server = serve("gate")
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    waiting = [background(pass_gate, server, events, name) for name in ("a", "b")]
    wait_for_pending(server, "gate", 2)
    [worker] = workers(server)
    events.set("a.go", "b.go")
    worker.kill()
    assert running.result().status == 500
    assert [future.result().status for future in waiting] == [200, 200]


def test_readiness_drops_while_a_worker_is_away(serve: Serve, events: Events, background: Background) -> None:
    events.set("load")
    server = serve("e2e/slow_load", flags=("--exit-timeout-secs=5",))
    [worker] = workers(server)
    (events.folder / "load").unlink()
    (events.folder / "loading").unlink()
    worker.kill()
    eventually(lambda: get(server.http, "/v2/models/slow_load/ready").status == 400, "readiness dropping")
    assert get(server.http, "/v2/health/ready").status == 400
    assert get(server.http, "/v2/health/live").status == 200
    events.wait("loading")
    events.set("load")
    eventually(lambda: get(server.http, "/v2/health/ready").status == 200, "coming back")


def test_unloaded_model_gives_its_memory_back(serve: Serve) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=identity_fp32", "--load-model=plus_one")
    server = serve("identity_fp32", "plus_one", flags=flags)
    before = workers(server)
    assert len(before) == 2
    assert post(server.http, "/v2/repository/models/plus_one/unload").status == 200
    eventually(lambda: sum(alive(worker) for worker in before) == 1, "the worker's end")
    assert len(workers(server)) == 1


def test_reloading_many_times_leaves_one_worker(serve: Serve, tmp_path: Path) -> None:
    server = serve("identity_fp32", flags=("--model-control-mode=explicit", "--load-model=identity_fp32"))
    for n in range(5):
        os.utime(tmp_path / "models" / "identity_fp32" / "1" / "model.py", (2**31 + n, 2**31 + n))
        assert post(server.http, "/v2/repository/models/identity_fp32/load").status == 200
    eventually(lambda: len(workers(server)) == 1, "the old workers' end")
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    left = ["conch-guard", "conch-template", "conch-worker"]
    eventually(
        lambda: sorted(child.name() for child in process.children(recursive=True)) == left,
        "the last of them being waited for",
    )


def test_killed_server_leaves_no_worker(serve: Serve, events: Events, background: Background) -> None:
    server = serve("gate", "identity_fp32")
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    left = workers(server)
    assert len(left) == 2
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: not any(alive(worker) for worker in left), "the workers' end")
    assert running.exception() is not None


def test_reload_under_load_loses_no_request(serve: Serve, tmp_path: Path, background: Background) -> None:
    server = serve("identity_fp32", flags=("--model-control-mode=explicit", "--load-model=identity_fp32"))
    done: list[bool] = []
    statuses: list[int] = []

    def keep_asking() -> None:
        body = {"inputs": [tensor("INPUT", "FP32", [1.5])]}
        while not done:
            statuses.append(post(server.http, "/v2/models/identity_fp32/infer", body).status)

    clients = [background(keep_asking) for _ in range(4)]
    for n in range(3):
        seen = len(statuses)
        eventually(lambda seen=seen: len(statuses) > seen + 20, "requests being answered")
        os.utime(tmp_path / "models" / "identity_fp32" / "1" / "model.py", (2**31 + n, 2**31 + n))
        assert post(server.http, "/v2/repository/models/identity_fp32/load").status == 200
    done.append(True)
    for client in clients:
        client.result()
    assert len(statuses) > 60
    assert set(statuses) == {200}


def test_queue_bound_refuses_at_once(serve: Serve, events: Events, background: Background) -> None:
    server = serve("gate_bounded")
    model = "gate_bounded"
    futures = [background(pass_gate, server, events, "running", model)]
    events.wait("running.started")
    for count, name in enumerate(("a", "b"), 1):
        futures.append(background(pass_gate, server, events, name, model))
        wait_for_pending(server, model, count)
    refused = [pass_gate(server, events, f"late{n}", model) for n in range(5)]
    assert {reply.status for reply in refused} == {503}
    assert all("retry-after" in reply.headers for reply in refused)
    events.set("running.go", "a.go", "b.go")
    assert [future.result().status for future in futures] == [200] * 3
