"""One server in the process, and everything that has its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import conch
from conch.client.deadline import Deadline
from conch.client.service import RequestTarget
from conch.library.loop_thread import LoopThread
from conch.server.model import Model
from conch.server.models.version_loader import VersionLoader
from tests.models import build, write

MODELS = ("add_sub", "echo_request", "gate", "generate", "identity_batched", "repeat", "types")
#: Says its text in upper case, row by row, and counts the rows of the requests that it gets at a time.
SHOUT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        rows = sum(map(len, texts))
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("text_output", np.array([[one.decode().upper()] for one in text[:, 0]], np.object_)),
                pb_utils.Tensor("ROWS", np.full((len(text), 1), rows, np.int32)),
            ])
            for text in texts
        ]
"""
SHOUT_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 100000 }
"""
#: Answers without outputs; with ``sender`` by a response sender, which says separately that nothing follows.
HOLLOW = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        if not pb_utils.get_input_tensor_by_name(requests[0], "SENDER").as_numpy().any():
            return [pb_utils.InferenceResponse([]) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HOLLOW_CONFIG = """
backend: "python"
input { name: "SENDER" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_BOOL dims: [ 1 ] }
"""


class BlockingStream(conch.ResultStream):
    """A stream of an ``AsyncServer`` for code that has no event loop."""

    def __init__(self, thread: LoopThread, stream: conch.AsyncResultStream) -> None:
        self.thread, self.stream = thread, stream

    def __next__(self) -> conch.InferResult:
        async def step() -> conch.InferResult | None:
            return await anext(self.stream, None)

        result = self.thread.run(step())
        if result is None:
            raise StopIteration
        return result

    def close(self) -> None:
        self.thread.run(self.stream.aclose())


class OnALoop(conch.InferenceService):
    """An ``AsyncServer`` for code that has no event loop; every call goes through its own method there."""

    def __init__(self, server: conch.AsyncServer, thread: LoopThread) -> None:
        self.server, self.thread = server, thread

    def infer(self, *arguments: Any, **options: Any) -> conch.InferResult:
        return self.thread.run(self.server.infer(*arguments, **options))

    def generate(self, *arguments: Any, **options: Any) -> conch.InferResult:
        return self.thread.run(self.server.generate(*arguments, **options))

    def infer_stream(self, *arguments: Any, **options: Any) -> conch.ResultStream:
        async def begin() -> conch.AsyncResultStream:
            return self.server.infer_stream(*arguments, **options)

        return BlockingStream(self.thread, self.thread.run(begin()))

    def generate_stream(self, *arguments: Any, **options: Any) -> conch.ResultStream:
        async def begin() -> conch.AsyncResultStream:
            return self.server.generate_stream(*arguments, **options)

        return BlockingStream(self.thread, self.thread.run(begin()))

    def live(self, *arguments: Any, **options: Any) -> bool:
        return self.thread.run(self.server.live(*arguments, **options))

    def ready(self, *arguments: Any, **options: Any) -> bool:
        return self.thread.run(self.server.ready(*arguments, **options))

    def metadata(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.thread.run(self.server.metadata(*arguments, **options))

    def config(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.thread.run(self.server.config(*arguments, **options))

    def statistics(self, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        return self.thread.run(self.server.statistics(*arguments, **options))

    def models(self, *arguments: Any, **options: Any) -> list[dict[str, str]]:
        return self.thread.run(self.server.models(*arguments, **options))

    def load(self, *arguments: Any, **options: Any) -> None:
        self.thread.run(self.server.load(*arguments, **options))

    def unload(self, *arguments: Any, **options: Any) -> None:
        self.thread.run(self.server.unload(*arguments, **options))

    def close(self) -> None:
        self.thread.run(self.server.close())

    def _target(self, model: str, version: int, deadline: Deadline) -> AbstractContextManager[RequestTarget]:
        raise AssertionError("its methods are the server's")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with some of the toy models."""
    repository = build(tmp_path_factory.mktemp("library") / "models", *MODELS)
    write(repository, "shout", SHOUT_CONFIG, {"1/model.py": SHOUT})
    write(repository, "hollow", HOLLOW_CONFIG, {"1/model.py": HOLLOW})
    return repository


class ServerInTwoParts:
    """Keeps the ``AsyncServer`` of a ``Server`` and the thread that it runs in, so that tests can use it directly."""

    def __init__(self) -> None:
        self.server: conch.AsyncServer
        self.thread: LoopThread

    def make_server(self, *arguments: Any, **options: Any) -> conch.AsyncServer:
        self.server = conch.AsyncServer(*arguments, **options)
        return self.server

    def make_thread(self) -> LoopThread:
        self.thread = LoopThread()
        return self.thread


@pytest.fixture(scope="module")
def parts() -> ServerInTwoParts:
    return ServerInTwoParts()


@pytest.fixture(scope="module")
def server(folder: Path, parts: ServerInTwoParts) -> Iterator[conch.Server]:
    """A server of all of them, with ports."""
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "*", "http_port": 0, "grpc_port": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conch.library.server.AsyncServer", parts.make_server)
        patch.setattr("conch.library.server.LoopThread", parts.make_thread)
        server = conch.Server(model_repository=folder, exit_timeout_secs=5, **options).start()
    with closing(server):
        yield server


@pytest.fixture(scope="module", params=["server", "async", "grpc", "http"])
def service(
    request: pytest.FixtureRequest, server: conch.Server, parts: ServerInTwoParts
) -> Iterator[conch.InferenceService]:
    """The same server by each of the ways to it."""
    if request.param == "server":
        yield server
    elif request.param == "async":
        yield OnALoop(parts.server, parts.thread)
    else:
        with conch.Client(server.urls[request.param]) as client:
            yield client


@dataclass
class HangingLoads:
    """While ``hang`` is set, loads hang until they are cancelled, and keep their model's lock until ``may_end``."""

    hang: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def hanging_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingLoads]:
    loads = HangingLoads()
    load = VersionLoader.load

    async def load_or_hang(*arguments: Any) -> Model:
        if not loads.hang:
            return await load(*arguments)
        loads.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(loads.may_end.wait)
        raise AssertionError("it ends only when it is cancelled")

    monkeypatch.setattr(VersionLoader, "load", load_or_hang)
    yield loads
    loads.may_end.set()
