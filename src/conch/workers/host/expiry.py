"""When the time is over that clients give to requests that a worker has.

Belongs to a ``WorkerProcess``; on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from conch.errors import unavailable
from conch.inference import InferRequest


class Expiries:
    """The timers of the requests that have not been dropped yet."""

    def __init__(self) -> None:
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def add(self, request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
        """Answer a request that expires when its time is over.

        Its place is free when the worker has given it up, which ``cancel`` asks of it.
        """
        seconds = (request.expires - monotonic_ns()) / 1e9
        self._timers[request.serial] = asyncio.get_running_loop().call_later(seconds, _expire, request, cancel)

    def drop(self, request: InferRequest) -> None:
        """The worker is done with a request, whose time may be hours: no timer is kept for it."""
        timer = self._timers.pop(request.serial, None)
        if timer is not None:
            timer.cancel()


def _expire(request: InferRequest, cancel: Callable[[InferRequest], None]) -> None:
    if not request.finished:
        cancel(request)
        request.fail(unavailable("Request timeout expired"))
