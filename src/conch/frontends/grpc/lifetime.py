"""Ends connections that are dead or too old: keepalive pings, and the age at which clients must reconnect.

Each connection has a ``Lifetime``, made by :mod:`conch.frontends.grpc.server`; its timers run on the event loop.
"""

from __future__ import annotations

import asyncio

from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.frames import Http2ErrorCode
from conch.settings import Settings


class Lifetime:
    """The timers of a connection."""

    def __init__(self, connection: Http2Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._loop = loop = asyncio.get_running_loop()
        #: Pings sent since anything else was.
        self._pings = 0
        self._useful = 0
        self._silence: asyncio.TimerHandle | None = None
        if settings.grpc_keepalive_time:
            self._silence = loop.call_later(settings.grpc_keepalive_time / 1000, self._check)
        self._age: asyncio.TimerHandle | None = None
        if settings.grpc_max_connection_age:
            self._age = loop.call_later(settings.grpc_max_connection_age / 1000, self._grow_old)

    def stop(self) -> None:
        """Cancel the timers: the connection has ended."""
        for timer in (self._silence, self._age):
            if timer is not None:
                timer.cancel()

    def _check(self) -> None:
        """Ping a client from which nothing has arrived for the keepalive time."""
        connection, settings = self._connection, self._settings
        if connection.active:
            connection.active = False
        elif (connection.session.streams or settings.grpc_keepalive_permit_without_calls) and self._may_ping():
            connection.ping()
            self._silence = self._loop.call_later(settings.grpc_keepalive_timeout / 1000, self._expect_pong)
            return
        self._silence = self._loop.call_later(settings.grpc_keepalive_time / 1000, self._check)

    def _may_ping(self) -> bool:
        """Count a ping, of which only so many may be sent without any data in between."""
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
