"""Calls from model to model when something ends early: a caller, a worker, a model, the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import Reply, get, post, tensor
from tests.e2e.conftest import Serve
from tests.e2e.processes import workers
from tests.events import Events, eventually
from tests.models import write
from tests.servers import ConchServer

Background = Callable[..., Future[Any]]

CONFIG = """
backend: "python"
input { name: "PROGRAM" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "RESULT" data_type: TYPE_STRING dims: [ 1 ] }
"""
#: Runs the body of a coroutine function, which may call ``gate`` and ``plus_one``.
CALLER = """
import asyncio, os, textwrap
import numpy as np
import triton_python_backend_utils as pb_utils

def call(model, outputs, **inputs):
    tensors = [pb_utils.Tensor(name, value) for name, value in inputs.items()]
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=tensors)

def gate(name):
    text = lambda value: np.array([[value]], np.object_)
    return call("gate", ["OUTPUT"], EVENTS=text(os.environ["EVENTS"]), NAME=text(name))

def plus_one(value):
    return call("plus_one", ["Y"], X=value)

async def started(name):
    while not os.path.exists(os.path.join(os.environ["EVENTS"], name + ".started")):
        await asyncio.sleep(0.003)

def outcome(response):
    return response.error().message() if response.has_error() else response.output_tensors()[0].as_numpy().ravel()[0]

class TritonPythonModel:
    def execute(self, requests):
        program = requests[0].inputs()[0].as_numpy()[0].decode()
        names = dict(globals())
        with open(os.path.join(os.environ["EVENTS"], "pid"), "w") as file:
            file.write(str(os.getpid()))
        exec("async def run():\\n" + textwrap.indent(program, "    "), names)
        result = np.array([str(asyncio.run(names["run"]()))], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("RESULT", result)])]
"""


@pytest.fixture
def server(serve: Serve, tmp_path: Path) -> ConchServer:
    write(tmp_path / "models", "caller", CONFIG, {"1/model.py": CALLER})
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=300")
    return serve("gate", "plus_one", flags=flags)


def run(server: ConchServer, program: str) -> Reply:
    body = {"inputs": [tensor("PROGRAM", "BYTES", [program], [1])]}
    return post(server.http, "/v2/models/caller/infer", body)


def result(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    text: str = reply.json()["outputs"][0]["data"][0]
    return text


@pytest.mark.parametrize(
    "program",
    [
        "responses = gate('x').exec(decoupled=True)\nawait started('x')\ndel responses",
        "responses = gate('x').exec(decoupled=True)\nawait started('x')\nresponses.cancel()\nlist(responses)",
        "future = gate('x').async_exec()\nawait started('x')\nfuture.cancel()\ndel future\nawait asyncio.sleep(0)",
        "async def wait(): return await gate('x').async_exec(decoupled=True)\n"
        "task = asyncio.create_task(wait())\nawait started('x')",
        "async def wait():\n"
        "    async for response in gate('x').exec(decoupled=True): pass\n"
        "task = asyncio.create_task(wait())\nawait started('x')\ntask.cancel()",
    ],
    ids=["dropped", "cancelled", "future cancelled", "loop ended", "iteration cancelled"],
)
def test_an_abandoned_call_is_cancelled(server: ConchServer, events: Events, program: str) -> None:
    before = result(run(server, "return outcome(plus_one(np.zeros((1, 1), np.float32)).exec())"))
    run(server, program)
    events.wait("x.cancelled")
    assert result(run(server, "return outcome(plus_one(np.zeros((1, 1), np.float32)).exec())")) == before == "1.0"


def test_calls_of_a_worker_that_dies_are_cancelled(server: ConchServer, events: Events, background: Background) -> None:
    reply = background(run, server, "return outcome(gate('x').exec())")
    events.wait("x.started")
    os.kill(int((events.folder / "pid").read_text()), signal.SIGKILL)
    assert reply.result().status == 500
    events.wait("x.cancelled")


def test_model_is_unloaded_after_the_calls_that_it_has(
    server: ConchServer, events: Events, background: Background
) -> None:
    program = "first = outcome(gate('x').exec())\nreturn [first.decode(), outcome(gate('x').exec())]"
    reply = background(run, server, program)
    events.wait("x.started")
    assert post(server.http, "/v2/repository/models/gate/unload", {}).status == 200
    events.set("x.go")
    assert result(reply.result()) == str(
        [
            "x",
            "Model gate - Error when running inference: Failed for execute the inference request. "
            "Model 'gate' is not ready.",
        ]
    )


def test_caller_is_unloaded_after_its_calls(server: ConchServer, events: Events, background: Background) -> None:
    program = "first = outcome(gate('x').exec())\nreturn outcome(plus_one(np.ones((1, 1), np.float32)).exec())"
    reply = background(run, server, program)
    events.wait("x.started")
    assert post(server.http, "/v2/repository/models/caller/unload", {}).status == 200
    events.set("x.go")
    assert result(reply.result()) == "2.0"
    eventually(lambda: len(workers(server)) == 2, "the caller's end")


def test_server_that_stops_still_lets_models_call(server: ConchServer, events: Events, background: Background) -> None:
    program = "first = outcome(gate('x').exec())\nreturn outcome(plus_one(np.ones((1, 1), np.float32)).exec())"
    reply = background(run, server, program)
    events.wait("x.started")
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Waiting for in-flight" in server.log.read_text() if server.log else True, "the shutdown")
    events.set("x.go")
    assert result(reply.result()) == "2.0"
    assert server.process.wait(60) == 0


def test_large_tensors_give_their_memory_back(server: ConchServer) -> None:
    program = """
value = np.zeros((1, 4_000_000), np.float32)
for number in range(40):
    value = plus_one(value).exec().output_tensors()[0].as_numpy()
return sum(1 for line in open("/proc/self/maps") if "conch" in line)
"""
    counts = [int(result(run(server, program))) for _ in range(3)]
    assert max(counts) < 20


LOADING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        for name in {names}:
            pb_utils.load_model(name)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([requests[0].inputs()[0]])]
"""


def test_loads_of_models_that_load_do_not_wait_for_each_other(serve: Serve, tmp_path: Path) -> None:
    for name, names in (("first", ["second", "plus_one"]), ("second", ["third"]), ("third", [])):
        write(tmp_path / "models", name, CONFIG, {"1/model.py": LOADING.format(names=names)})
    server = serve("plus_one", flags=("--model-control-mode=explicit", "--model-load-thread-count=1"))
    assert post(server.http, "/v2/repository/models/first/load", {}).status == 200
    for name in ("first", "second", "third", "plus_one"):
        assert get(server.http, f"/v2/models/{name}/ready").status == 200


@pytest.mark.parametrize("names", [["one"], ["one", "two"]])
def test_models_that_wait_for_each_other_to_load_fail(serve: Serve, tmp_path: Path, names: list[str]) -> None:
    for name, needed in zip(names, [*names[1:], names[0]], strict=True):
        write(tmp_path / "models", name, CONFIG, {"1/model.py": LOADING.format(names=[needed])})
    server = serve(flags=("--model-control-mode=explicit",))
    reply = post(server.http, "/v2/repository/models/one/load", {})
    assert reply.status == 400
    assert "model 'one' waits for this load while it is being loaded itself" in reply.error
