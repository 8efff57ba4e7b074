"""What a connection has to send: frames in order, DATA under flow control, one write for a batch.

Owned by a connection, runs on the event loop.  Streams with data take turns, a frame each, while
the connection's window and the transport allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from conch.frontends.grpc.http2.frames import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    FRAME,
    ConnectionFault,
    Http2ErrorCode,
)
from conch.frontends.grpc.http2.limits import MAX_HELD_FRAMES
from conch.tensors import Buffer

if TYPE_CHECKING:
    from conch.frontends.grpc.http2.streams import Stream

#: The largest DATA frame sent, whatever the peer takes: streams take turns by frames.
MAX_TURN: Final = 256 << 10
#: A batch of this many bytes is written before more is collected, and copied together if smaller than ``_COPIED``.
_BATCH: Final = 256 << 10
_COPIED: Final = 32 << 10


class Outbox:
    """``window`` and ``frame_size`` are the peer's; ``paused`` is set while the transport has enough."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.window = DEFAULT_WINDOW
        self.frame_size = DEFAULT_FRAME_SIZE
        self.paused = False
        #: Goes before the next header block: a table size update that the peer's settings call for.
        self.block_prefix = b""
        self._loop = loop
        self._transport = transport
        self._ready: deque[Stream] = deque()
        self._held: list[bytes] = []
        self._batch: list[Buffer] = []
        self._size = 0
        self._scheduled = False

    def write(self, frame: bytes) -> None:
        """Send a frame that flow control does not count; raises ``ConnectionFault`` if the peer reads none of many."""
        if self.paused:
            if len(self._held) >= MAX_HELD_FRAMES:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")
            self._held.append(frame)
        else:
            self.add((frame,), len(frame))

    def add(self, frames: Iterable[Buffer], size: int) -> None:
        """Put ``size`` bytes of whole frames into the batch; the caller has counted its DATA."""
        self._batch.extend(frames)
        self._size += size
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def cork(self) -> None:
        """The caller will flush: nothing needs to be scheduled meanwhile."""
        self._scheduled = True

    def flush(self) -> None:
        """Write the batch."""
        self._scheduled = False
        batch, size = self._batch, self._size
        if not batch:
            return
        self._batch = []
        self._size = 0
        if self._transport.is_closing():
            return
        if size <= _COPIED:
            self._transport.write(b"".join(batch))
        else:
            self._transport.writelines(batch)

    def ready(self, stream: Stream) -> None:
        """The stream has data and a window, and is not in line yet."""
        self._ready.append(stream)
        if len(self._ready) == 1:
            self.pump()

    def pump(self) -> None:
        """Turn waiting data into frames as far as possible."""
        ready = self._ready
        while ready and self.window > 0 and not self.paused:
            stream = ready.popleft()
            size = min(stream.queued, stream.send_window, self.window, self.frame_size)
            if size > 0:
                self.window -= size
                self.add((FRAME.pack(size << 8 | DATA, 0, stream.id), *stream.take(size)), size + FRAME.size)
            if stream.queued and stream.send_window > 0:
                ready.append(stream)
            else:
                stream.out_of_turn()
            if self._size >= _BATCH:
                scheduled = self._scheduled
                self.flush()
                self._scheduled = scheduled

    def resume(self) -> None:
        """The transport takes data again."""
        self.paused = False
        held, self._held = self._held, []
        self.add(held, sum(map(len, held)))
        self.pump()
        self.flush()
