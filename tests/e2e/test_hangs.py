"""A stalled worker is distinguished from a working one, fails only its own requests, and is replaced."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psutil

from tests.conformance.conftest import gate_request, pass_gate
from tests.conformance.raw import Reply, get, post, tensor
from tests.e2e.conftest import Serve
from tests.e2e.processes import alive, workers
from tests.events import Events, eventually
from tests.servers import ConchServer

Background = Callable[..., Future[Any]]


def hang(server: ConchServer, how: str) -> Reply:
    return post(server.http, "/v2/models/hang/infer", {"inputs": [tensor("HOW", "BYTES", [how], [1, 1])]})


def pid(server: ConchServer) -> int:
    reply = hang(server, "not at all")
    assert reply.status == 200, reply.body
    found: int = reply.json()["outputs"][0]["data"][0]
    return found


def ready(server: ConchServer) -> bool:
    return readiness(server) == {200}


def readiness(server: ConchServer) -> set[int]:
    """The statuses of the model's readiness and the server's, which are the same but for a moment."""
    return {get(server.http, path).status for path in ("/v2/models/hang/ready", "/v2/health/ready")}


def kills(server: ConchServer, model: str) -> dict[str, int]:
    """How many workers of a model were killed, by reason."""
    page = get(server.metrics, "/metrics").body.decode()
    found = re.findall(rf'^conch_worker_kills{{model="{model}",reason="(\w+)"}} (\d+)$', page, re.MULTILINE)
    return {reason: int(count) for reason, count in found}


def test_stopped_worker_leaves_readiness_fails_its_requests_and_is_replaced(
    serve: Serve, events: Events, background: Background
) -> None:
    server = serve("e2e/hang")
    before = pid(server)
    [worker] = workers(server)
    running = background(hang, server, "wait")
    events.wait("waiting")
    worker.send_signal(signal.SIGSTOP)
    eventually(lambda: readiness(server) == {400}, "readiness dropping")
    reply = running.result(60)
    assert reply.status == 500
    assert re.fullmatch(
        r"Stub process 'hang_0' is not healthy\. It was killed: it was stopped by a signal for \d+ s "
        r"\(--stopped-worker-secs\)\.",
        reply.error,
    )
    eventually(lambda: ready(server), "coming back")
    assert pid(server) != before and not alive(worker)
    assert kills(server, "hang") == {"stopped": 1}
    page = get(server.metrics, "/metrics").body.decode()
    assert 'conch_worker_restarts_total{model="hang",reason="killed",version="1"} 1' in page
    assert 'conch_model_ready{model="hang",version="1"} 1' in page


def test_worker_that_holds_the_interpreter_is_left_alone(serve: Serve, background: Background) -> None:
    server = serve("e2e/hang", flags=("--silent-worker-secs=2",))
    before = pid(server)
    busy = background(hang, server, "spin 4")
    while not busy.done():
        assert ready(server)
        time.sleep(0.1)
    assert busy.result().status == 200
    assert (pid(server), kills(server, "hang")) == (before, {})


def test_worker_that_is_silent_is_replaced_when_patience_ends(serve: Serve) -> None:
    server = serve("e2e/hang", flags=("--silent-worker-secs=2",))
    before = pid(server)
    reply = hang(server, "sleep 60")
    assert reply.status == 500
    assert re.search(r"no heartbeat and no processor time for \d+ s \(--silent-worker-secs\)", reply.error)
    eventually(lambda: ready(server), "coming back")
    assert pid(server) != before
    assert kills(server, "hang") == {"silent": 1}


def test_execution_has_a_deadline(serve: Serve) -> None:
    server = serve("e2e/hang", flags=("--execute-timeout-secs=1",))
    reply = hang(server, "wait")
    assert reply.status == 500 and "(--execute-timeout-secs)" in reply.error
    eventually(lambda: ready(server), "coming back")
    assert kills(server, "hang") == {"execution": 1}


def test_server_that_was_stopped_itself_kills_no_worker(serve: Serve) -> None:
    server = serve("e2e/hang", flags=("--silent-worker-secs=1",))
    before = pid(server)
    assert server.process is not None
    both = [psutil.Process(server.process.pid), *workers(server)]
    for process in both:
        process.suspend()
    time.sleep(3)
    for process in reversed(both):  # the server must not find its worker stopped
        process.resume()
    assert (pid(server), kills(server, "hang")) == (before, {})


def test_model_that_blocks_in_initialize_keeps_none_from_loading_and_can_be_unloaded(
    serve: Serve, events: Events, background: Background
) -> None:
    flags = ("--model-control-mode=explicit", "--model-load-thread-count=1")
    server = serve("e2e/stuck", "identity_fp32", flags=flags)
    loading = background(post, server.http, "/v2/repository/models/stuck/load")
    events.wait("stuck")
    again = background(post, server.http, "/v2/repository/models/stuck/load")
    assert post(server.http, "/v2/repository/models/identity_fp32/load").status == 200
    assert not loading.done()
    assert post(server.http, "/v2/repository/models/stuck/unload").status == 200
    for load in (loading, again):
        reply = load.result(60)
        assert (reply.status, reply.error) == (
            503, "load failed for model 'stuck': the model was unloaded during the load",
        )  # fmt: skip
    eventually(lambda: len(workers(server)) == 1, "the end of both its workers")
    events.set("go")
    assert post(server.http, "/v2/repository/models/stuck/load").status == 200
    assert len(workers(server)) == 3


def test_load_that_does_nothing_fails_with_its_reason(serve: Serve, events: Events) -> None:
    flags = ("--model-control-mode=explicit", "--load-idle-secs=2")
    server = serve("e2e/stuck", flags=flags)
    reply = post(server.http, "/v2/repository/models/stuck/load")
    assert reply.status == 400
    assert "Stub process 'stuck_0_1' is not healthy. It was killed: its model has been loading for" in reply.error
    assert "(--load-idle-secs)" in reply.error
    eventually(lambda: not workers(server), "the end of both its workers")
    assert kills(server, "stuck") == {"load": 1}


def test_server_stops_although_a_model_blocks_in_initialize(serve: Serve, events: Events) -> None:
    server = serve("e2e/stuck", flags=("--exit-timeout-secs=300",), wait=False)
    events.wait("stuck")
    assert server.process is not None
    server.process.terminate()
    assert server.process.wait(60) == 0


def test_time_of_a_request_holds_while_it_runs_and_frees_its_place(serve: Serve, events: Events) -> None:
    server = serve("gate_bounded")
    for seconds in (0.3, 3, 30):  # a busy machine may not start it in time
        body = {**gate_request(events, "late"), "parameters": {"timeout": int(seconds * 1e6)}}
        reply = post(server.http, "/v2/models/gate_bounded/infer", body)
        assert (reply.status, reply.error) == (503, "Request timeout expired")
        if events.happened("late.started"):
            break
    events.wait("late.cancelled")
    events.set("next.go")
    assert pass_gate(server, events, "next", "gate_bounded").status == 200


def test_unload_does_not_wait_for_a_model_that_hangs(serve: Serve, events: Events, background: Background) -> None:
    flags = (
        "--model-control-mode=explicit",
        "--load-model=hang",
        "--unload-timeout-secs=1",
        "--finalize-timeout-secs=1",
    )
    server = serve("e2e/hang", flags=flags)
    running = background(hang, server, "wait")
    events.wait("waiting")
    assert post(server.http, "/v2/repository/models/hang/unload").status == 200
    assert running.result(60).status == 500
    eventually(lambda: not workers(server), "the worker's end")
    assert post(server.http, "/v2/repository/models/hang/load").status == 200
    assert hang(server, "finalize").status == 200
    assert post(server.http, "/v2/repository/models/hang/unload").status == 200
    eventually(lambda: not workers(server), "the worker's end")
    assert kills(server, "hang") == {"unload": 1, "finalize": 1}
