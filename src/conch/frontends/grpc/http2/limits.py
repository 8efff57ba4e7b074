"""Limits of one connection: windows, streams, frames that make work for nothing.

The figures are far above what gRPC clients need (their bandwidth pings and window updates are frequent) and far below
what hurts.  Used by connections, on the event loop.
"""

from __future__ import annotations

from typing import Final

from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode

MAX_STREAMS: Final = 1024
#: The receive window of a connection (bytes): never what holds a client up, as each stream is bounded by its own.
CONNECTION_WINDOW: Final = 1 << 30
#: Bytes that a stream may send before a message of it is taken; the receive window of a new stream.
STREAM_WINDOW: Final = 256 << 10
#: Bytes that it may send ahead of a message larger than that.
MESSAGE_WINDOW: Final = 4 << 20
#: DATA is handled as it arrives, so that large frames cost no memory and save work.
RECEIVE_FRAME_SIZE: Final = 1 << 20
#: Frames other than DATA and those of header blocks are smaller (bytes).
MAX_CONTROL_FRAME: Final = 16 << 10
#: The size of a header block (bytes) over all its frames, and the number of its CONTINUATION frames.
MAX_HEADER_BLOCK: Final = 128 << 10
MAX_CONTINUATIONS: Final = 16
#: DATA frames with fewer bytes than that, which do not end their stream, are counted as overhead.
TINY_DATA: Final = 32
#: A client may well send a WINDOW_UPDATE for each so many bytes that it was sent, and so many for each answer: those of
#: small requests have fewer bytes, and gRPC clients give back the windows of the stream and of the connection for each.
#: They may also cancel what has just been answered, and end messages with small DATA frames.
_SENT_PER_UPDATE: Final = 256
_FRAMES_PER_ANSWER: Final = 8
#: Frames without use are judged so many at a time, because requests in number have two each.
OVERHEAD_BATCH: Final = 64
#: A stream that has lived for longer (s) may be reset as often as the client likes: its deadline may have
#: passed; with so few streams at a time, opening and resetting them like that is no flood.
SUDDEN: Final = 0.1
#: Frames that may wait because the client does not read.
MAX_BLOCKED_FRAMES: Final = 10_000


class RateLimiter:
    """A token bucket: events may come ``rate`` times a second on average, and ``burst`` at once.

    What makes more of them plausible adds to the bucket with ``allow``.
    """

    __slots__ = ("_burst", "_events", "_rate", "_tokens", "_updated")

    def __init__(self, events: str, burst: int, rate: int) -> None:
        self._events = events
        self._burst = burst
        self._rate = rate
        self._tokens = float(burst)
        self._updated = 0.0

    def take(self, now: float, count: int = 1) -> None:
        """Count events until ``now`` (seconds); raises ``ConnectionFault``, naming them, if there are too many."""
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate) - count
        self._updated = now
        if self._tokens < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._events}")

    def allow(self, events: int) -> None:
        """Let so many further events come, up to ``burst``."""
        self._tokens = min(self._burst, self._tokens + events)


class FloodGuard:
    """Counts the frames of a connection that make work without any use, as nginx and nghttp2 do."""

    __slots__ = ("_answers", "_overhead", "_sent", "pings", "resets", "settings")

    def __init__(self) -> None:
        self.resets = RateLimiter("stream resets", 1000, 200)
        self.settings = RateLimiter("SETTINGS frames", 100, 20)
        self.pings = RateLimiter("PING frames", 20_000, 5000)
        self._overhead = RateLimiter("frames without use", 10_000, 1000)
        self._sent = 0
        self._answers = 0

    def take_overhead(self, frames: int, sent: int, answers: int, now: float) -> None:
        """Count ``frames`` without use; the bytes ``sent`` and the ``answers`` (so far) make some of them plausible."""
        updates = (sent - self._sent) // _SENT_PER_UPDATE
        self._overhead.allow(updates + (answers - self._answers) * _FRAMES_PER_ANSWER)
        self._sent += updates * _SENT_PER_UPDATE
        self._answers = answers
        self._overhead.take(now, frames)
