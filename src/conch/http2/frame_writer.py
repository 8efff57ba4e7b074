"""Sends the frames of a connection: in order, DATA under flow control, many in one write.

Owned by the connection; runs on the event loop. Streams with queued data send one frame each in turn, while the
connection's window and the transport allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from conch.core.tensors import Buffer
from conch.http2.frames import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    FRAME,
    ConnectionFault,
    Http2ErrorCode,
)
from conch.http2.limits import MAX_BLOCKED_FRAMES

#: Maximum size of a sent DATA frame (bytes), even if the client accepts larger ones: streams alternate by frames.
MAX_SEND_FRAME_SIZE: Final = 256 << 10
#: A batch of this size (bytes) is written before more is collected; one up to ``_JOINED`` bytes is joined first.
_BATCH: Final = 256 << 10
_JOINED: Final = 32 << 10


class DataSource(Protocol):
    """A stream as seen by the writer: ``queued`` bytes of DATA, up to ``send_window`` of which may be sent."""

    id: int
    queued: int
    send_window: int

    def take(self, size: int) -> list[Buffer]:
        """Remove ``size`` queued bytes and count them against ``send_window``."""

    def on_dequeued(self) -> None:
        """Handle the removal from the writer's queue; the source may be enqueued again."""


class Http2FrameWriter:
    """Writes the frames of a connection.

    ``window`` (bytes) and ``frame_size`` are the client's; ``paused`` is set while the transport accepts no data.
    ``resumed`` counts how often the transport accepted data again, ``useful`` the frames other than responses to
    control frames, and ``messages`` the messages queued by streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self.window = DEFAULT_WINDOW
        self.frame_size = DEFAULT_FRAME_SIZE
        self.paused = False
        self.resumed = 0
        self.useful = 0
        self.messages = 0
        #: Prefix of the next header block: the table size update that the client's settings require.
        self.block_prefix = b""
        self._loop = loop
        self._transport = transport
        self._sources: deque[DataSource] = deque()
        #: Frames that wait until the transport accepts data again.
        self._blocked: list[bytes] = []
        self._batch: list[Buffer] = []
        self._size = 0
        self._scheduled = False

    def write(self, frame: bytes) -> None:
        """Send a frame not subject to flow control; raises ``ConnectionFault`` if too many are unread."""
        if self.paused:
            if len(self._blocked) >= MAX_BLOCKED_FRAMES:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "responses are not read")
            self._blocked.append(frame)
        else:
            self.add((frame,), len(frame))

    def add(self, frames: Iterable[Buffer], size: int) -> None:
        """Add whole frames of ``size`` bytes to the batch; their DATA must be counted against the windows."""
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
        """Queue a source that has data and a window; it must not be enqueued already."""
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
        """Continue when the transport accepts data again."""
        self.paused = False
        self.resumed += 1
        blocked, self._blocked = self._blocked, []
        self.add(blocked, sum(map(len, blocked)))
        self.pump()
        self.flush()
