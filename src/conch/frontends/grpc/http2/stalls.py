"""Clients that take too long: to say that they speak HTTP/2, to end a frame or a message, to read, to do anything.

One ``StallWatch`` for each connection; the front end's sweep asks it once a second, on the event loop.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from conch.frontends.grpc.http2.frame_reader import Http2FrameReader
from conch.frontends.grpc.http2.frame_writer import Http2FrameWriter
from conch.frontends.grpc.http2.frames import Http2ErrorCode
from conch.frontends.grpc.http2.session import Http2Session
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.limits import SLOWEST, ClientLimits
from conch.telemetry.traffic import Reason


class _Stall(NamedTuple):
    """Since when (s) a client owes something, and how many bytes had moved by then."""

    since: float
    moved: int


class WatchedConnection(Protocol):
    """What is looked at, and what is done about it."""

    reader: Http2FrameReader
    writer: Http2FrameWriter
    session: Http2Session

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        """End the connection at once."""

    def drain(self) -> None:
        """End it when its calls have."""


_BODY: Final = "the message did not arrive within --body-timeout-secs"
_UNREAD: Final = "the answer was not read within --unread-timeout-secs"


class StallWatch:
    """Remembers since when each thing is owed; all times are monotonic seconds."""

    def __init__(self, limits: ClientLimits, began: float) -> None:
        self._times = limits.times
        self._counts = limits.counts
        self._began = began
        self._partial: _Stall | None = None
        self._blocked: _Stall | None = None
        self._idle = _Stall(began, 0)
        self._draining_since = 0.0
        #: By stream, and by where in its body the message begins.
        self._owed: dict[tuple[int, int], _Stall] = {}
        self._unread: dict[int, _Stall] = {}

    def look(self, connection: WatchedConnection, now: float) -> None:
        """End what has taken too long at ``now``."""
        if connection.session.closed:
            return
        if self._handshake_is_late(connection, now):
            self._end(connection, "head", "the head of a request did not arrive within --head-timeout-secs")
        elif self._is_blocked(connection.writer, now):
            self._end(connection, "unread", _UNREAD)
        elif connection.session.streams:
            self._idle = _Stall(now, connection.session.last_stream)
            self._look_at_streams(connection.session, now)
        else:
            self._owed.clear()
            self._unread.clear()
            self._look_at_idle(connection, now)

    def _end(self, connection: WatchedConnection, reason: Reason, message: str) -> None:
        self._counts.closed_for("grpc", reason)
        connection.fail(Http2ErrorCode.ENHANCE_YOUR_CALM, message)

    def _handshake_is_late(self, connection: WatchedConnection, now: float) -> bool:
        """Whether the client's SETTINGS, or the rest of a frame or of a header block, are."""
        if not connection.session.greeted:
            return now - self._began > self._times.head
        if not connection.reader.partial and not connection.session.in_header_block:
            self._partial = None
            return False
        frames = connection.session.blocks if connection.session.in_header_block else connection.reader.frames
        if self._partial is None or self._partial.moved != frames:
            self._partial = _Stall(now, frames)
        return now - self._partial.since > self._times.head

    def _is_blocked(self, writer: Http2FrameWriter, now: float) -> bool:
        """Whether the transport has taken nothing for too long, because the client does not read."""
        if not writer.paused:
            self._blocked = None
            return False
        if self._blocked is None or self._blocked.moved != writer.resumed:
            self._blocked = _Stall(now, writer.resumed)
        return now - self._blocked.since > self._times.unread

    def _look_at_idle(self, connection: WatchedConnection, now: float) -> None:
        """Send away a client that has had no call for too long; one that does not go is hung up on."""
        if self._idle.moved != connection.session.last_stream:
            self._idle = _Stall(now, connection.session.last_stream)
        elif self._draining_since:
            if now - self._draining_since > self._times.head:
                connection.fail(Http2ErrorCode.NO_ERROR, "max_idle")
        elif now - self._idle.since > self._times.idle:
            self._draining_since = now
            self._counts.closed_for("grpc", "idle")
            connection.drain()

    def _look_at_streams(self, session: Http2Session, now: float) -> None:
        owed: dict[tuple[int, int], _Stall] = {}
        unread: dict[int, _Stall] = {}
        for stream in list(session.streams.values()):
            awaited = stream.handler.awaited
            if awaited is not None:
                stall = self._owed.get((stream.id, awaited)) or _Stall(now, stream.received)
                owed[stream.id, awaited] = stall
                if now - stall.since > self._times.body + (stream.received - stall.moved) / SLOWEST:
                    self._stop(stream, "body", _BODY)
            if stream.queued:
                stall = self._unread.get(stream.id) or _Stall(now, stream.sent)
                unread[stream.id] = stall
                if now - stall.since > self._times.unread + (stream.sent - stall.moved) / SLOWEST:
                    self._stop(stream, "unread", _UNREAD)
        self._owed = owed
        self._unread = unread

    def _stop(self, stream: Http2Stream, reason: Reason, message: str) -> None:
        self._counts.closed_for("grpc", reason)
        stream.handler.on_stalled(message)
