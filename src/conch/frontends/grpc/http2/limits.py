"""What one connection may cost: bytes held, streams, frames that make work for nothing.

The figures are far above what gRPC clients do (their bandwidth pings and window updates are
frequent) and far below what hurts.  Used by connections, on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode

MAX_STREAMS: Final = 1024
#: Bytes that a stream may send before a message of it is taken; the receive window of a new stream.
STREAM_WINDOW: Final = 256 << 10
#: Bytes of larger messages that a connection collects at the same time.
MESSAGE_BUDGET: Final = 256 << 20
#: DATA is handled as it arrives, so that large frames cost no memory and save work.
RECEIVE_FRAME_SIZE: Final = 1 << 20
#: Bytes of a header block, in whatever number of frames; and that number.
MAX_HEADER_BLOCK: Final = 32 << 10
MAX_CONTINUATIONS: Final = 16
#: Frames that wait because the peer does not read.
MAX_HELD_FRAMES: Final = 10_000


class Allowance:
    """Refuses what comes more often than ``rate`` times a second for longer than ``burst`` of them."""

    __slots__ = ("_burst", "_left", "_rate", "_seen", "_what")

    def __init__(self, what: str, burst: int, rate: int) -> None:
        self._what = what
        self._burst = burst
        self._rate = rate
        self._left = float(burst)
        self._seen = 0.0

    def take(self, now: float) -> None:
        """Count one at time ``now`` (seconds); raises ``ConnectionFault`` when there are too many."""
        self._left = min(self._burst, self._left + (now - self._seen) * self._rate) - 1
        self._seen = now
        if self._left < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")


class MessageBudget:
    """Shares the bytes that a connection may hold of incomplete messages larger than a window.

    A message whose size fits is *granted* it at once, others wait their turn, and the first in line
    is always served when nobody else is: any single message can be received.
    """

    __slots__ = ("_granted", "_left", "_waiting")

    def __init__(self, size: int) -> None:
        self._left = size
        self._granted: dict[object, int] = {}
        self._waiting: deque[tuple[object, int, Callable[[], None]]] = deque()

    def request(self, owner: object, size: int, granted: Callable[[], None]) -> None:
        """Ask for ``size`` bytes for ``owner``; ``granted`` is called as soon as it has them, perhaps now."""
        self._waiting.append((owner, size, granted))
        self._grant()

    def release(self, owner: object) -> None:
        """The owner's message is complete or given up; no effect on one that asked for nothing."""
        size = self._granted.pop(owner, None)
        if size is None:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not owner)
        else:
            self._left += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][1] <= self._left or not self._granted):
            owner, size, granted = self._waiting.popleft()
            self._left -= size
            self._granted[owner] = size
            granted()
