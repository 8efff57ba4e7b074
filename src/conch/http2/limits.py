"""Limits of connections: windows, streams, time, pings, and frames that cause work without any use.

The limits are far above the needs of gRPC clients (which send frequent bandwidth pings and window updates) and far
below harmful values. Used by connections, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from conch.http2.frames import ConnectionFault, Http2ErrorCode

MAX_STREAMS: Final = 1024
#: The receive window of a connection (bytes); large enough never to block, as each stream has its own limit.
CONNECTION_WINDOW: Final = 1 << 30
#: Bytes that a stream may send before a message is read; the receive window of a new stream.
STREAM_WINDOW: Final = 256 << 10
#: Bytes that a stream may send ahead of a larger message.
MESSAGE_WINDOW: Final = 4 << 20
#: Maximum size of a received frame (bytes); DATA is handled as it arrives, so large frames need no memory.
RECEIVE_FRAME_SIZE: Final = 1 << 20
#: Maximum size of frames other than DATA and header blocks (bytes).
MAX_CONTROL_FRAME: Final = 16 << 10
#: Maximum size of a header block (bytes) over all its frames, and maximum number of its CONTINUATION frames.
MAX_HEADER_BLOCK: Final = 128 << 10
MAX_CONTINUATIONS: Final = 16
#: DATA frames smaller than this (bytes) that do not end their stream count as overhead.
TINY_DATA: Final = 32
#: A client may send one WINDOW_UPDATE per this many bytes received, and this many frames per response: responses to
#: small requests have fewer bytes, and gRPC clients restore the windows of stream and connection for each. Clients may
#: also cancel calls that have just been answered, and end messages with small DATA frames.
_SENT_PER_UPDATE: Final = 256
_FRAMES_PER_RESPONSE: Final = 8
#: Overhead frames are checked in batches of this size, because most requests have two.
OVERHEAD_BATCH: Final = 64
#: Streams older than this (s) may be reset without limit: their deadline may have passed, and with so few concurrent
#: streams, such resets are not a flood.
SUDDEN: Final = 0.1
#: Maximum number of frames that wait while the client does not read.
MAX_BLOCKED_FRAMES: Final = 10_000


class ByteCounter(Protocol):
    """Counts the bytes that all connections hold: received DATA, and DATA that waits to be sent."""

    def take(self, size: int) -> bool:
        """Add bytes; the result, whether there is budget for them, is not used."""

    def release(self, size: int) -> None:
        """Subtract bytes."""


class LoopBudget(Protocol):
    """Limits the time that all connections together use in one iteration of the event loop."""

    def over(self) -> bool:
        """Whether the rest of the work must wait for a later iteration."""

    def later(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later iteration."""


@dataclass(frozen=True, slots=True)
class PingLimits:
    """Minimum ``interval`` (s) between two pings without data, and the number of ``strikes`` allowed."""

    interval: float
    interval_without_calls: float
    strikes: float


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """The limits that an application sets for its connections, which share ``budget`` and ``loop_budget``.

    ``head``, ``body``, ``unread`` and ``idle`` are time limits (s; ``inf`` for none): for the head of a request, the
    rest of a message, reading a response, and a connection without requests. ``body`` and ``unread`` grow by one second
    for every ``min_rate`` bytes transferred.
    """

    budget: ByteCounter
    loop_budget: LoopBudget
    pings: PingLimits
    min_rate: int
    head: float = inf
    body: float = inf
    unread: float = inf
    idle: float = inf


class RateLimiter:
    """A token bucket: allows ``rate`` events per second on average, and ``burst`` at once.

    ``allow`` adds tokens for events that are plausible for another reason.
    """

    __slots__ = ("_burst", "_events", "_rate", "_tokens", "_updated")

    def __init__(self, events: str, burst: int, rate: int) -> None:
        self._events = events
        self._burst = burst
        self._rate = rate
        self._tokens = float(burst)
        self._updated = 0.0

    def take(self, now: float, count: int = 1) -> None:
        """Count events until ``now`` (s); raises ``ConnectionFault``, naming them, if there are too many."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate) - count
        self._updated = now
        if self._tokens < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._events}")

    def allow(self, events: int) -> None:
        """Allow further events, up to ``burst``."""
        self._tokens = min(self._burst, self._tokens + events)


class FloodGuard:
    """Counts the frames of a connection that cause work without any use, as nginx and nghttp2 do."""

    __slots__ = ("_overhead", "_responses", "_sent", "pings", "resets", "settings")

    def __init__(self) -> None:
        self.resets = RateLimiter("stream resets", 1000, 200)
        self.settings = RateLimiter("SETTINGS frames", 100, 20)
        self.pings = RateLimiter("PING frames", 20_000, 5000)
        self._overhead = RateLimiter("frames without use", 10_000, 1000)
        self._sent = 0
        self._responses = 0

    def take_overhead(self, frames: int, sent: int, responses: int, now: float) -> None:
        """Count overhead frames; the bytes ``sent`` and the ``responses`` so far make some of them plausible."""
        updates = (sent - self._sent) // _SENT_PER_UPDATE
        self._overhead.allow(updates + (responses - self._responses) * _FRAMES_PER_RESPONSE)
        self._sent += updates * _SENT_PER_UPDATE
        self._responses = responses
        self._overhead.take(now, frames)


class PingStrikes:
    """Counts the pings of one connection that came too early."""

    __slots__ = ("_last", "_limits", "_strikes")

    def __init__(self, limits: PingLimits) -> None:
        self._limits = limits
        self._strikes = 0
        self._last = -inf

    def reset(self) -> None:
        """Allow the next ping at once, because something was sent since the last one."""
        self._strikes = 0
        self._last = -inf

    def are_too_many(self, now: float, *, calls: bool) -> bool:
        """Count a ping at ``now`` (s, monotonic); ``calls`` is true if there are open calls."""
        interval = self._limits.interval if calls else self._limits.interval_without_calls
        if now - self._last < interval:
            self._strikes += 1
        self._last = now
        return self._strikes > self._limits.strikes
