"""``Health/Watch``: tells those who watch whether the server is ready, now and whenever that changes.

``Check`` is in :mod:`~conch.frontends.grpc.control`.  Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from grpc_health.v1 import health_pb2

from conch.frontends.grpc.calls import UnaryCall
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.grpc.large import parse
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import CallFault, Status
from conch.server.core import InferenceServer
from conch.tensors import Buffer

#: The services whose health is known: the server as a whole, and the one that serves models.
SERVICES: Final = ("", "inference.GRPCInferenceService")
#: How often the readiness is looked at while somebody watches (s).
_PERIOD: Final = 0.25

_SERVING: Final = health_pb2.HealthCheckResponse.ServingStatus


class HealthWatchers:
    """The calls that watch; looks at the server for all of them."""

    def __init__(self, server: InferenceServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._calls: set[WatchCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> int:
        return int(_SERVING.SERVING if self._server.ready else _SERVING.NOT_SERVING)

    def add(self, call: WatchCall) -> None:
        """Tell a call what changes from now on."""
        self._calls.add(call)
        if self._timer is None:
            self._timer = self._loop.call_later(_PERIOD, self._look)

    def remove(self, call: WatchCall) -> None:
        """The call has ended."""
        self._calls.discard(call)
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = self._loop.call_later(_PERIOD, self._look)
        exiting, status = self._server.exiting, self.status
        for call in list(self._calls):
            if call.service in SERVICES:
                call.tell(status)
            if exiting:
                # The call would keep the server from stopping.
                call.abort(Status.UNAVAILABLE, "Server exiting")


class WatchCall(UnaryCall):
    """Sends the status of a service at once, and then each one that differs from the last."""

    __slots__ = ("_told", "_watchers", "service")

    def __init__(
        self, stream: Http2Stream, head: RequestHead, loop: asyncio.AbstractEventLoop, watchers: HealthWatchers
    ) -> None:
        super().__init__(stream, head, loop)
        self._watchers = watchers
        self._told: int | None = None
        self.service = ""

    def run(self, message: Buffer) -> None:
        self.service = parse(health_pb2.HealthCheckRequest, message).service
        self.release(self.message_size)
        # An unknown service may come, says the protocol; here, it never does.
        self.tell(self._watchers.status if self.service in SERVICES else _SERVING.SERVICE_UNKNOWN)
        self._watchers.add(self)

    def run_compressed(self, message: Buffer) -> None:
        raise CallFault(Status.RESOURCE_EXHAUSTED, "the message is too large")

    def tell(self, status: int) -> None:
        """Send a status unless it is the last that was sent, or that one has not been read yet."""
        if status != self._told and not self.unsent:
            self._told = status
            self.send([health_pb2.HealthCheckResponse(status=status).SerializeToString()])

    def on_cancel(self) -> None:
        self._watchers.remove(self)
