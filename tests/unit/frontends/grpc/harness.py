"""The gRPC front end over the fake core, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from conch.frontends.budget import ByteBudget
from conch.frontends.grpc.server import GrpcFrontend
from conch.frontends.limits import ClientLimits, TimeLimits
from conch.frontends.offloading.offloader import Offloader
from conch.options.settings import Settings
from tests.unit.frontends.grpc.fake_core import FakeModel, FakeServer
from tests.unit.frontends.grpc.raw_client import RawClient

T = TypeVar("T")


class Frontend:
    """A context manager; ``address`` is host and port, ``target`` the same as clients write it."""

    def __init__(self, *models: FakeModel, **settings: Any) -> None:
        # Tests ping to know what has arrived.
        self.settings = Settings(**{"grpc_http2_max_ping_strikes": 0, **settings})
        self.budget = ByteBudget(256 << 20)
        self.offloader = Offloader(1 << 30, 30, self.budget)
        self.server = FakeServer(self.settings, *models)
        self.address: tuple[str, int] = ("", 0)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Frontend:
        self._thread.start()
        try:
            self.limits = self.call(ClientLimits, self.budget, TimeLimits.of(self.settings))
            self.frontend = GrpcFrontend(self.server, self.settings, self.limits, self.offloader)  # type: ignore[arg-type]
            self.address = self.wait(self.frontend.start("127.0.0.1", 0))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait(self.frontend.stop(0))
            self.wait(self.offloader.close())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def target(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def client(self, **settings: Any) -> RawClient:
        return RawClient(self.address, **settings)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def begin(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine on the event loop; the result is a future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the event loop."""

        async def work() -> T:
            return function(*arguments)

        return self.wait(work())

    def until(self, condition: Callable[[], Any]) -> None:
        """Return once the condition, looked at on the event loop, holds."""

        async def work() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        self.wait(work())
