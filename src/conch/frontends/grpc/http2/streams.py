"""One HTTP/2 stream: its windows, what waits to be sent on it, and who receives what comes in.

Made by a connection for every request; calls hold it to answer.  Runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from conch.frontends.grpc.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    Http2ErrorCode,
    rst_stream,
    window_update,
)
from conch.frontends.grpc.http2.limits import STREAM_WINDOW, MessageBudget
from conch.frontends.grpc.http2.roles import NOBODY, Receiver
from conch.tensors import Buffer

if TYPE_CHECKING:
    from conch.frontends.grpc.http2.connection import Connection
    from conch.frontends.grpc.http2.outbox import Outbox


class Stream:
    """``queued`` counts bytes of DATA that wait to be sent; ``closed`` streams take nothing any more."""

    __slots__ = (
        "_connection", "_data", "_in_line", "_outbox", "_trailers", "closed", "id", "queued", "receive_window",
        "receiver", "remote_ended", "send_window",
    )  # fmt: skip

    def __init__(self, connection: Connection, outbox: Outbox, id: int, send_window: int) -> None:
        self.id = id
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW
        self.queued = 0
        self.remote_ended = False
        self.closed = False
        self.receiver: Receiver = NOBODY
        self._connection = connection
        self._outbox = outbox
        self._data: deque[Buffer] | None = None
        self._trailers: bytes | None = None
        self._in_line = False

    @property
    def budget(self) -> MessageBudget:
        """The bytes that messages arriving on this connection share."""
        return self._connection.budget

    # Sending

    def respond(self, headers: bytes, body: Sequence[Buffer], size: int, trailers: bytes) -> None:
        """The whole answer: a header block, ``size`` bytes of DATA, trailers."""
        outbox = self._outbox
        if size > self.send_window or size > outbox.window or size > outbox.frame_size or outbox.paused:
            self.send_headers(headers)
            self.send(body, size)
            self.finish(trailers)
            return
        if outbox.block_prefix:
            headers, outbox.block_prefix = outbox.block_prefix + headers, b""
        outbox.window -= size
        outbox.add(
            (
                FRAME.pack(len(headers) << 8 | HEADERS, END_HEADERS, self.id),
                headers,
                FRAME.pack(size << 8 | DATA, 0, self.id),
                *body,
                FRAME.pack(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, self.id),
                trailers,
            ),
            size + len(headers) + len(trailers) + 3 * FRAME.size,
        )
        self._ended()

    def send_headers(self, block: bytes) -> None:
        self._write_headers(block, END_HEADERS)

    def send(self, body: Sequence[Buffer], size: int) -> None:
        """Queue ``size`` bytes of DATA, more than none."""
        if self._data is None:
            self._data = deque(body)
        else:
            self._data.extend(body)
        self.queued += size
        if not self._in_line and self.send_window > 0:
            self._in_line = True
            self._outbox.ready(self)

    def finish(self, block: bytes) -> None:
        """End the stream with this header block, after all data."""
        if self.queued:
            self._trailers = block
        else:
            self._write_headers(block, END_HEADERS | END_STREAM)
            self._ended()

    def reset(self, code: Http2ErrorCode) -> None:
        """End the stream at once; what is queued is dropped and the receiver not told."""
        if not self.closed:
            self._connection.forget(self)
            self._outbox.write(rst_stream(self.id, code))

    def _write_headers(self, block: bytes, flags: int) -> None:
        outbox = self._outbox
        if outbox.block_prefix:
            block, outbox.block_prefix = outbox.block_prefix + block, b""
        outbox.write(FRAME.pack(len(block) << 8 | HEADERS, flags, self.id) + block)

    def _ended(self) -> None:
        self._connection.forget(self)
        if not self.remote_ended:
            # The client need not send the rest: the answer is complete (RFC 9113, 8.1).
            self._outbox.write(rst_stream(self.id, Http2ErrorCode.NO_ERROR))

    # The outbox's side

    def take(self, size: int) -> list[Buffer]:
        """``size`` queued bytes, uncopied, for a frame."""
        data = self._data
        assert data is not None
        self.queued -= size
        self.send_window -= size
        parts: list[Buffer] = []
        while size:
            part = data.popleft()
            if len(part) > size:
                view = memoryview(part)
                data.appendleft(view[size:])
                part = view[:size]
            size -= len(part)
            parts.append(part)
        return parts

    def out_of_turn(self) -> None:
        """The stream has left the line: all is sent, or its window is used up."""
        self._in_line = False
        if self.queued or self.closed:
            return
        if self._trailers is not None:
            self.finish(self._trailers)
        else:
            self.receiver.drained()

    def widen(self, increment: int) -> None:
        """The peer has changed how much may be sent; the caller has checked the sum."""
        self.send_window += increment
        if self.queued and not self._in_line and self.send_window > 0:
            self._in_line = True
            self._outbox.ready(self)

    def discard(self) -> None:
        """Drop what is queued; the stream is closed."""
        self.closed = True
        # The receiver holds the stream: without a cycle both are freed at once, not by the garbage collector.
        self.receiver = NOBODY
        self.queued = 0
        self._data = None
        self._trailers = None

    # Receiving

    def deliver(self, chunk: Buffer, last: bool) -> None:
        """Pass on what came from the client; ``last`` if nothing follows."""
        if self.closed:
            return
        self.receive_window -= len(chunk)
        if last:
            self.remote_ended = True
        if chunk or last:
            self.receiver.data(chunk)

    def allow(self, size: int) -> None:
        """Let the client send up to ``size`` further bytes; small raises are put off until they are worth a frame."""
        increment = size - self.receive_window
        if increment >= STREAM_WINDOW // 2 and not self.remote_ended and not self.closed:
            self.receive_window += increment
            self._outbox.write(window_update(self.id, increment))
