"""Stopping: accepted requests are answered, new ones refused, nothing is left; and starting with a slow model."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import pass_gate, wait_for_pending
from tests.conformance.raw import get, post
from tests.e2e.conftest import Serve
from tests.e2e.processes import alive, workers
from tests.events import Events, eventually
from tests.models import write
from tests.servers import ConchServer

Background = Callable[..., Future[Any]]


def refuses(server: ConchServer, path: str) -> bool:
    """Whether the server no longer takes work: it says 503 or no longer listens."""
    try:
        return get(server.http, path).status == 503
    except OSError:
        return True


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "ctrl-c"])
def test_accepted_requests_are_answered_when_the_server_is_stopped(
    serve: Serve, events: Events, background: Background, sign: int
) -> None:
    server = serve("gate", flags=("--exit-timeout-secs=300",))
    futures = [background(pass_gate, server, events, "running")]
    events.wait("running.started")
    names = [f"n{n}" for n in range(10)]
    futures += [background(pass_gate, server, events, name) for name in names]
    wait_for_pending(server, "gate", 10)
    left = workers(server)
    assert server.process is not None
    server.process.send_signal(sign)
    eventually(lambda: refuses(server, "/v2/health/ready"), "refusing")
    events.set("late.go")
    try:
        assert pass_gate(server, events, "late").status == 503
    except OSError:
        pass
    assert server.process.poll() is None
    events.set("running.go", *(f"{name}.go" for name in names))
    assert [future.result().status for future in futures] == [200] * 11
    assert server.process.wait(60) == 0
    assert not events.happened("late.started")
    eventually(lambda: not any(alive(worker) for worker in left), "the workers' end")


def test_stopping_an_idle_server_ends_it_at_once(serve: Serve, tmp_path: Path) -> None:
    server = serve("gate", flags=("--exit-timeout-secs=300",))
    assert server.process is not None
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert "gate: finalized" in (tmp_path / "server.log").read_text()


def test_server_that_cannot_finish_in_time_ends_with_an_error(
    serve: Serve, events: Events, background: Background
) -> None:
    server = serve("gate", flags=("--exit-timeout-secs=1",))
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    left = workers(server)
    assert server.process is not None
    server.process.terminate()
    assert server.process.wait(60) == 1
    eventually(lambda: not any(alive(worker) for worker in left), "the workers' end")
    running.exception()


def test_idle_instances_are_finalized_when_busy_ones_cannot_finish_in_time(
    serve: Serve, events: Events, background: Background, tmp_path: Path
) -> None:
    server = serve("e2e/gate_twice", flags=("--exit-timeout-secs=3",))  # for the idle one, too
    running = background(pass_gate, server, events, "running", model="gate_twice")
    events.wait("running.started")
    assert server.process is not None
    server.process.terminate()
    assert server.process.wait(60) == 1
    assert (tmp_path / "server.log").read_text().count("gate: finalized") == 1
    running.exception()


def test_second_signal_does_not_lose_requests(serve: Serve, events: Events, background: Background) -> None:
    server = serve("gate", flags=("--exit-timeout-secs=300",))
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    assert server.process is not None
    server.process.terminate()
    eventually(lambda: refuses(server, "/v2/health/ready"), "refusing")
    server.process.terminate()
    events.set("running.go")
    assert running.result().status == 200
    assert server.process.wait(60) == 0


CALLER = """
import os, time
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        events = Path(os.environ["EVENTS"])
        (events / "running.started").touch()
        while not (events / "running.go").exists():
            time.sleep(0.003)
        request = pb_utils.InferenceRequest(
            model_name="identity_fp32", requested_output_names=["OUTPUT"], inputs=requests[0].inputs()
        )
        response = request.exec()
        return [pb_utils.InferenceResponse(response.output_tensors(), response.error())]
"""
CALLER_CONFIG = """backend: "python"
input { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def test_replaced_version_can_call_other_models_while_the_server_stops(
    serve: Serve, events: Events, background: Background, tmp_path: Path
) -> None:
    write(tmp_path / "models", "caller", CALLER_CONFIG, {"1/model.py": CALLER})
    flags = ("--exit-timeout-secs=300", "--model-control-mode=explicit", "--load-model=*")
    server = serve("identity_fp32", flags=flags)
    body = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1.5]}]}
    running = background(post, server.http, "/v2/models/caller/infer", body)
    events.wait("running.started")
    write(tmp_path / "models", "caller", CALLER_CONFIG, {"1/model.py": CALLER + "\n"})
    assert post(server.http, "/v2/repository/models/caller/load", {}).status == 200
    assert server.process is not None
    server.process.terminate()
    eventually(lambda: "in-flight inferences" in (tmp_path / "server.log").read_text(), "the log of the waiting server")
    events.set("running.go")
    assert running.result().json()["outputs"][0]["data"] == [1.5]
    assert server.process.wait(60) == 0


def test_server_is_live_but_not_ready_while_a_model_loads(serve: Serve, events: Events) -> None:
    """Triton does not listen before all models are loaded; conch answers probes at once."""
    server = serve("e2e/slow_load", "identity_fp32", wait=False)
    events.wait("loading")
    eventually(lambda: not_refused(server), "listening")
    assert get(server.http, "/v2/health/live").status == 200
    assert get(server.http, "/v2/health/ready").status == 400
    assert get(server.http, "/v2/models/slow_load/ready").status == 400
    index = {entry["name"]: entry.get("state") for entry in post(server.http, "/v2/repository/index").json()}
    assert index["slow_load"] == "LOADING"
    events.set("load")
    eventually(lambda: get(server.http, "/v2/health/ready").status == 200, "readiness")


def not_refused(server: ConchServer) -> bool:
    try:
        get(server.http, "/v2/health/live")
    except OSError:
        return False
    return True


def test_server_can_be_stopped_while_a_model_loads(serve: Serve, events: Events) -> None:
    server = serve("e2e/slow_load", flags=("--exit-timeout-secs=2",), wait=False)
    events.wait("loading")
    left = workers(server)
    assert server.process is not None
    server.process.terminate()
    server.process.wait(60)
    eventually(lambda: not any(alive(worker) for worker in left), "the workers' end")


def test_port_in_use_ends_the_server(serve: Serve, tmp_path: Path) -> None:
    first = serve("identity_fp32")
    ports = {"grpc": first.grpc.split(":")[1], "http": first.http.split(":")[1]}
    flags = [f"--{kind}-port={port}" for kind, port in ports.items()]
    second = ConchServer(tmp_path / "models", *flags, log=tmp_path / "second.log", wait=False)
    with second:
        assert second.process is not None
        assert second.process.wait(60) == 1
    log = (tmp_path / "second.log").read_text()
    assert first.process is not None
    told = [
        rf"Socket '.*:{port}' already in use by .* \(pid {first.process.pid}\): choose another port with --{kind}-port"
        for kind, port in ports.items()
    ]
    assert re.search(f"error: creating server: Internal - {told[0]}; {told[1]}\n", log), log
    assert "All models are stopped" not in log
