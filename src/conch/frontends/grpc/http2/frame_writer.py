"""Sends a connection's frames: in order, DATA under flow control, many with one write.

Owned by the connection; runs on the event loop.  Streams with queued data take turns, a frame each, while the
connection's window and the transport allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from conch.frontends.grpc.http2.frames import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    FRAME,
    ConnectionFault,
    Http2ErrorCode,
)
from conch.frontends.grpc.http2.limits import MAX_BLOCKED_FRAMES
from conch.tensors import Buffer

#: The largest DATA frame sent (bytes), even if the client takes larger ones: streams take turns by frames.
MAX_SEND_FRAME_SIZE: Final = 256 << 10
#: A batch of this many bytes is written before more is collected; one of at most ``_JOINED`` bytes is joined first.
_BATCH: Final = 256 << 10
_JOINED: Final = 32 << 10


class DataSource(Protocol):
    """A stream as the writer sees it: ``queued`` bytes of DATA, of which ``send_window`` may be sent."""

    id: int
    queued: int
    send_window: int

    def take(self, size: int) -> list[Buffer]:
        """Remove ``size`` queued bytes and count them against ``send_window``."""

    def on_dequeued(self) -> None:
        """The writer will not take from this source again until it is enqueued again."""


class Http2FrameWriter:
    """``window`` (bytes) and ``frame_size`` are the client's; ``paused`` is set while the transport takes no more.

    ``resumed`` counts how often it took more again, ``useful`` the frames that were more than answers to control
    frames, ``messages`` those that streams were given to send.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.window = DEFAULT_WINDOW
        self.frame_size = DEFAULT_FRAME_SIZE
        self.paused = False
        self.resumed = 0
        self.useful = 0
        self.messages = 0
        #: Precedes the next header block: the table size update that the client's settings ask for.
        self.block_prefix = b""
        self._loop = loop
        self._transport = transport
        self._sources: deque[DataSource] = deque()
        #: Frames that wait until the transport takes data again.
        self._blocked: list[bytes] = []
        self._batch: list[Buffer] = []
        self._size = 0
        self._scheduled = False

    def write(self, frame: bytes) -> None:
        """Send a frame that flow control does not count; raises ``ConnectionFault`` if too many wait to be read."""
        if self.paused:
            if len(self._blocked) >= MAX_BLOCKED_FRAMES:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")
            self._blocked.append(frame)
        else:
            self.add((frame,), len(frame))

    def add(self, frames: Iterable[Buffer], size: int) -> None:
        """Add whole frames, ``size`` bytes in all, to the batch; their DATA must be counted against the windows."""
        self._batch.extend(frames)
        self._size += size
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def cork(self) -> None:
        """Collect frames until the caller flushes, without scheduling a flush for them."""
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
        if size <= _JOINED:
            self._transport.write(b"".join(batch))
        else:
            self._transport.writelines(batch)

    def enqueue(self, source: DataSource) -> None:
        """Send from a source that has data and a window, in its turn; it must not be enqueued already."""
        self._sources.append(source)
        if len(self._sources) == 1:
            self.pump()

    def pump(self) -> None:
        """Send queued data as far as the windows and the transport allow."""
        sources = self._sources
        while sources and self.window > 0 and not self.paused:
            source = sources.popleft()
            size = min(source.queued, source.send_window, self.window, self.frame_size)
            if size > 0:
                self.window -= size
                self.useful += 1
                self.add((FRAME.pack(size << 8 | DATA, 0, source.id), *source.take(size)), size + FRAME.size)
            if source.queued and source.send_window > 0:
                sources.append(source)
            else:
                source.on_dequeued()
            if self._size >= _BATCH:
                scheduled = self._scheduled
                self.flush()
                self._scheduled = scheduled

    def resume(self) -> None:
        """The transport takes data again."""
        self.paused = False
        self.resumed += 1
        blocked, self._blocked = self._blocked, []
        self.add(blocked, sum(map(len, blocked)))
        self.pump()
        self.flush()
