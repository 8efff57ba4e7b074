"""Connected sockets in memory, of which the loop reads one end: what a worker and the server talk through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.simulation.loop import SimulatedLoop

#: How much the kernel takes before a socket is full (bytes).
_CAPACITY = 208 << 10


class SimulatedSocket:
    """The server's end; what it sends arrives at ``on_bytes`` in order, after a time that the loop draws."""

    def __init__(self, loop: SimulatedLoop, on_bytes: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self._loop = loop
        self._on_bytes = on_bytes
        self._on_closed = on_closed
        self._inbound: deque[bytes] = deque()
        self._ended = False
        self._closed = False
        self._unread = 0
        self._last_sent = self._last_arrival = 0
        self._fd = loop.open(self)

    # What the other end does

    def attach(self, on_bytes: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        """Have another process take the other end."""
        self._on_bytes, self._on_closed = on_bytes, on_closed
        if self._closed:
            self._loop.later(0, on_closed)

    def deliver_packet(self, data: bytes) -> None:
        """Have ``data`` arrive as one packet."""
        self._last_arrival = self._in_order(self._last_arrival, partial(self._inbound.append, data))

    def deliver(self, data: bytes) -> None:
        """Have ``data`` arrive, perhaps in two pieces."""
        random = self._loop.random
        if len(data) > 1 and random.random() < 0.05:
            cut = random.randrange(1, len(data))
            pieces = [data[:cut], data[cut:]]
        else:
            pieces = [data]
        for piece in pieces:
            self._last_arrival = self._in_order(self._last_arrival, partial(self._inbound.append, piece))

    def hang_up(self) -> None:
        """Have the end arrive, after everything that was sent."""
        self._last_arrival = self._in_order(self._last_arrival, self._end)

    def _end(self) -> None:
        self._ended = True

    def _in_order(self, last: int, event: Callable[[], object]) -> int:
        """Have an event happen after ``last`` (ns); returns when."""
        now = self._loop.clock.now_ns
        when = max(now + int(self._loop.latency(0.0001) * 1e9), last + 1)
        self._loop.later((when - now) / 1e9, event)
        return when

    # What the loop asks

    @property
    def readable(self) -> bool:
        return bool(self._inbound) or self._ended

    @property
    def writable(self) -> bool:
        return self._unread < _CAPACITY

    # What conch calls

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        if self._closed or self._ended:
            raise BrokenPipeError
        room = _CAPACITY - self._unread
        if room <= 0:
            raise BlockingIOError
        data = b"".join(bytes(buffer) for buffer in buffers)[:room]
        self._unread += len(data)
        self._last_sent = self._in_order(self._last_sent, lambda: self._read_by_peer(data))
        return len(data)

    def _read_by_peer(self, data: bytes) -> None:
        self._unread -= len(data)
        if not self._closed:
            self._on_bytes(data)

    def recvmsg_into(self, buffers: Sequence[Any], size: int, flags: int = 0) -> tuple[int, list[Any], int, None]:
        if not self._inbound:
            if self._ended:
                return 0, [], 0, None
            raise BlockingIOError
        (buffer,) = buffers
        data = self._inbound.popleft()
        taken = min(len(data), len(buffer))
        buffer[:taken] = data[:taken]
        if taken < len(data):
            self._inbound.appendleft(data[taken:])
        return taken, [], 0, None

    def recv(self, size: int) -> bytes:
        """A packet."""
        if not self._inbound and not self._ended:
            raise BlockingIOError
        return self._inbound.popleft() if self._inbound else b""

    def shutdown(self, how: int) -> None:
        self._ended = True
        self._loop.later(0, self._on_closed)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.later(0, self._on_closed)
