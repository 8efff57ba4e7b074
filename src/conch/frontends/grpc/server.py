"""The gRPC front end: listens, tracks its connections, and drains them at shutdown.

:mod:`conch.library.app` starts and stops it; runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from math import inf
from time import monotonic
from typing import Final

from conch.frontends.admission import Admission, AdmissionResult, descriptor_of
from conch.frontends.api_keys import NO_KEYS, ApiKeys
from conch.frontends.grpc.service import GrpcService
from conch.frontends.limits import SLOWEST, SWEEP_SECONDS, ClientLimits
from conch.frontends.listening import listen, make_context
from conch.frontends.offloading.offloader import Offloader
from conch.http2 import ExceededLimit, Http2Connection, Http2ErrorCode, Http2Limits, PingLimits
from conch.options.settings import Settings
from conch.server.core import InferenceServer

# Each connection has a ``Lifetime``; its timers run on the event loop.


class Lifetime:
    """The keepalive and maximum-age timers of a connection."""

    def __init__(self, connection: Http2Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._loop = loop = asyncio.get_running_loop()
        #: Pings sent since the last other frame.
        self._pings = 0
        self._useful = 0
        self._silence: asyncio.TimerHandle | None = None
        if settings.grpc_keepalive_time:
            self._silence = loop.call_later(settings.grpc_keepalive_time / 1000, self._check)
        self._age: asyncio.TimerHandle | None = None
        if settings.grpc_max_connection_age:
            self._age = loop.call_later(settings.grpc_max_connection_age / 1000, self._grow_old)

    def stop(self) -> None:
        """Cancel the timers; called when the connection has ended."""
        for timer in (self._silence, self._age):
            if timer is not None:
                timer.cancel()

    def _check(self) -> None:
        """Ping a client that has sent nothing for the keepalive time."""
        connection, settings = self._connection, self._settings
        if connection.active:
            connection.active = False
        elif (connection.session.streams or settings.grpc_keepalive_permit_without_calls) and self._may_ping():
            connection.ping()
            self._silence = self._loop.call_later(settings.grpc_keepalive_timeout / 1000, self._expect_pong)
            return
        self._silence = self._loop.call_later(settings.grpc_keepalive_time / 1000, self._check)

    def _may_ping(self) -> bool:
        """Count a ping; returns whether the limit of pings without data allows it."""
        useful = self._connection.writer.useful
        if useful != self._useful:
            self._useful = useful
            self._pings = 0
        self._pings += 1
        return self._pings <= (self._settings.grpc_http2_max_pings_without_data or self._pings)

    def _expect_pong(self) -> None:
        if not self._connection.active:
            self._connection.fail(Http2ErrorCode.NO_ERROR, "keepalive_timeout")
            return
        self._silence = self._loop.call_later(self._settings.grpc_keepalive_time / 1000, self._check)

    def _grow_old(self) -> None:
        self._connection.drain()
        grace = self._settings.grpc_max_connection_age_grace
        if grace:
            self._age = self._loop.call_later(grace / 1000, self._connection.fail, Http2ErrorCode.NO_ERROR, "max_age")


class GrpcFrontend:
    """Serves ``server`` over gRPC according to ``settings``; observes its connections."""

    def __init__(
        self,
        server: InferenceServer,
        settings: Settings,
        limits: ClientLimits,
        offloader: Offloader,
        keys: ApiKeys = NO_KEYS,
    ) -> None:
        self._server = server
        self._keys = keys
        self._settings = settings
        self._limits = limits
        self._offloader = offloader
        self._sweeping: asyncio.TimerHandle | None = None
        self._lifetimes: dict[Http2Connection, Lifetime] = {}
        self._listener: asyncio.Server | None = None
        self._all_gone = asyncio.Event()
        self._stopping = False

    @property
    def connections(self) -> Collection[Http2Connection]:
        """The open connections."""
        return self._lifetimes.keys()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen on ``host:port`` (port 0: any free port); returns the address.

        Raises PortTakenError, and INVALID_ARG for unusable TLS files.
        """
        loop = asyncio.get_running_loop()
        service = GrpcService(self._server, loop, self._offloader, self._limits, self._keys)
        limits = http2_limits(self._settings, self._limits)
        self._listener, address = await listen(
            lambda: Http2Connection(service, loop, self, limits),
            host,
            port,
            reuse_port=self._settings.reuse_grpc_port,
            tls=make_context(self._settings, "grpc"),
            handshake_seconds=self._limits.times.head,
        )
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep_again)
        return address

    async def stop(self, grace_seconds: float) -> None:
        """Accept no more requests, let in-flight ones complete for up to ``grace_seconds``, then cancel the rest."""
        self._stopping = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._lifetimes):
            connection.drain()
        if self._lifetimes:
            self._all_gone.clear()
            try:
                await asyncio.wait_for(self._all_gone.wait(), grace_seconds)
            except TimeoutError:
                for connection in list(self._lifetimes):
                    connection.fail(Http2ErrorCode.NO_ERROR, "server is stopping")

    def sweep(self, now: float) -> None:
        """End what exceeds a time limit at ``now`` (s, monotonic)."""
        for connection in list(self._lifetimes):
            connection.sweep(now)

    def _sweep_again(self) -> None:
        """Check all connections; one timer serves all of them."""
        self.sweep(monotonic())
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep_again)

    def on_connection_made(self, connection: Http2Connection) -> None:
        self._limits.counts.opened("grpc")
        self._lifetimes[connection] = Lifetime(connection, self._settings)
        if self._limits.admission.admit("grpc", descriptor_of(connection.transport)) is not AdmissionResult.SERVED:
            connection.fail(Http2ErrorCode.ENHANCE_YOUR_CALM, str(Admission.refusal()))
        if self._stopping:
            connection.drain()

    def on_connection_lost(self, connection: Http2Connection) -> None:
        self._limits.counts.ended("grpc")
        self._lifetimes.pop(connection).stop()
        if not self._lifetimes:
            self._all_gone.set()

    def on_limit_exceeded(self, limit: ExceededLimit) -> None:
        self._limits.counts.closed_for("grpc", limit)


#: gRPC's minimum interval between pings on a connection without calls, unless keepalive pings are permitted there (s).
_WITHOUT_CALLS: Final = 2 * 3600.0


def http2_limits(settings: Settings, limits: ClientLimits) -> Http2Limits:
    """Return the limits of connections according to the options; the connections share the budgets of ``limits``."""
    times = limits.times
    return Http2Limits(
        budget=limits.budget,
        loop_budget=limits.loop_budget,
        pings=ping_limits(settings),
        min_rate=SLOWEST,
        head=times.head,
        body=times.body,
        unread=times.unread,
        idle=times.idle,
    )


def ping_limits(settings: Settings) -> PingLimits:
    """Return gRPC's limits of pings according to the options ``--grpc-http2-…``."""
    interval = settings.grpc_http2_min_recv_ping_interval_without_data / 1000
    return PingLimits(
        interval,
        interval if settings.grpc_keepalive_permit_without_calls else max(interval, _WITHOUT_CALLS),
        settings.grpc_http2_max_ping_strikes or inf,
    )
