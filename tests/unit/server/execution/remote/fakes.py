"""Servers of a remote model that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import prod
from typing import Any

from conch.config import pbtxt
from conch.config.remote import RemoteSettings, RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor, pack_bytes
from conch.server.execution.remote.executor import RemoteExecutor, RemoteSequences
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.packing import OutputWatch

A, B = "grpc://a:1", "grpc://b:1"


class Call:
    """A request that a server has; the test answers it, and sees whether it was cancelled."""

    def __init__(self, request: InferRequest, deliver: Callable[[InferResponse], None]) -> None:
        self.request = request
        self.deliver = deliver
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, shape: tuple[int, ...] = (1, 1)) -> None:
        self.deliver(InferResponse([WireTensor("y", "FP32", shape, bytes(4 * prod(shape)))]))
        self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        self.done.set_exception(error)


class FakeServer:
    """A transport without a network.

    ``refusal`` is raised for every request, ``reason`` when it is asked if ready. The configuration is returned once
    it was asked if ready ``checks_to_load`` times.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.on_broken: Callable[[], None] = lambda: None
        self.reason: Exception | None = None
        self.refusal: ConchError | None = None
        self.calls: list[Call] = []
        self.came = asyncio.Event()
        self.seconds: list[float | None] = []
        self.tried = 0
        self.closed = False
        self.checks_to_load = 0
        self.loaded = asyncio.Event()

    async def check(self) -> None:
        self.checks_to_load -= 1
        if self.checks_to_load < 0:
            self.loaded.set()
        if self.reason is not None:
            raise self.reason

    async def config(self) -> ModelConfig:
        await self.loaded.wait()
        return pbtxt.parse("max_batch_size: 4", "fake")

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        self.tried += 1
        self.seconds.append(seconds)
        if self.refusal is not None:
            raise self.refusal
        call = Call(request, deliver)
        self.calls.append(call)
        self.came.set()
        await call.done

    async def close(self) -> None:
        self.closed = True

    async def next(self) -> Call:
        """The next request that comes, or has come."""
        while not self.calls:
            self.came.clear()
            await self.came.wait()
        return self.calls.pop(0)


class RemoteBench:
    """An executor over fake servers, and the requests that were given to it."""

    def __init__(
        self,
        *urls: str,
        limit: int = 100,
        decoupled: bool = False,
        key: str = "",
        sequences: RemoteSequences | None = None,
        **settings: Any,
    ) -> None:
        self.servers: dict[str, FakeServer] = {}
        self.statistics = ModelStatistics("m", 1)
        self.warnings: list[str] = []
        watch = OutputWatch("m", self.warnings.append)
        watch.declare({"max_batch_size": 4, "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]})
        self.executor = RemoteExecutor(
            "m",
            RemoteSettings(urls, "m", **{"health_interval": 600.0, **settings}),
            self._connect,
            self.statistics,
            decoupled=decoupled,
            limit=limit,
            idle_seconds=60.0,
            key=key,
            sequences=sequences,
            watch=watch,
        )

    def _connect(self, url: RemoteUrl) -> FakeServer:
        return self.servers.setdefault(url.text, FakeServer(url.text))

    def fails(self, url: str, reason: ConchError) -> None:
        """Have a server be away, also before it is listed."""
        self.servers.setdefault(url, FakeServer(url)).reason = reason

    def send(self, text: bytes = b"", **options: Any) -> Sent:
        """Submit a request, whose input ``text_input`` begins with ``text``."""
        return Sent(self.executor, text, options)


class Sent:
    """A request, its responses, and its end."""

    def __init__(self, executor: RemoteExecutor, text: bytes, options: dict[str, Any]) -> None:
        self.responses: list[InferResponse] = []
        self.ended = asyncio.Event()
        inputs = {"text_input": WireTensor("text_input", "BYTES", (1,), pack_bytes([text]))}
        self.request = InferRequest("m", inputs, self._on_response, **options)
        executor.submit(self.request)

    def _on_response(self, response: InferResponse) -> None:
        self.responses.append(response)
        if response.final:
            self.ended.set()

    async def error(self) -> ConchError:
        await self.ended.wait()
        error = self.responses[-1].error
        assert error is not None
        return error
