"""One HTTP/2 stream: its windows, the data queued to be sent, and the handler of what arrives.

A connection makes one for every request; calls hold it to answer.  Runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from conch.frontends.budget import ByteBudget
from conch.frontends.grpc.http2.frame_writer import Http2FrameWriter
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
from conch.frontends.grpc.http2.limits import STREAM_WINDOW
from conch.frontends.loop_budget import EventLoopBudget
from conch.tensors import Buffer


class StreamHandler(Protocol):
    """Handles what happens on a stream; called on the event loop."""

    @property
    def awaited(self) -> int | None:
        """With which byte of the body that began of which the client owes the rest.

        None if it owes nothing, or something else than the client holds it up.
        """

    def on_stalled(self, message: str) -> None:
        """The client has taken too long for what it owes, or to read; ``message`` names the limit."""

    def on_data(self, chunk: Buffer) -> None:
        """Take the next bytes of the body; they are empty only at its end, when ``stream.remote_ended`` is set."""

    def on_reset(self) -> None:
        """The client reset the stream, or its connection ended: nothing can be sent any more."""

    def on_drained(self) -> None:
        """Everything that was queued has been sent."""


class _IgnoringHandler:
    """Handles a stream that nobody listens to: one that is over, or that was refused when it was opened."""

    awaited = None

    def on_stalled(self, message: str) -> None:
        pass

    def on_data(self, chunk: Buffer) -> None:
        pass

    def on_reset(self) -> None:
        pass

    def on_drained(self) -> None:
        pass


IGNORE: Final[StreamHandler] = _IgnoringHandler()


class StreamOwner(Protocol):
    """What a stream needs of its connection.

    ``budget`` counts what arrives and what waits to be sent; all connections share it, and ``loop_budget``.
    """

    budget: ByteBudget
    loop_budget: EventLoopBudget

    def on_stream_closed(self, stream: Http2Stream, *, answered: bool) -> None:
        """The server has ended the stream, ``answered``, or reset it."""


class Http2Stream:
    """A request and its response.

    ``queued`` counts the bytes of DATA that wait to be sent, ``send_window`` and ``receive_window`` those that flow
    control allows.  ``remote_ended`` says that the client has sent everything, ``closed`` that nothing can be sent.
    ``opened`` is when it began (s, by the clock of the loop).  ``given`` is the sum of the receive windows, ``sent``
    that of the bytes that were queued and have left.
    ``content_left`` counts the bytes of the body that the client still owes, None where it has announced no length.
    """

    __slots__ = (
        "_data", "_enqueued", "_owner", "_trailers", "_writer", "budget", "closed", "content_left", "given", "handler",
        "id", "opened", "queued", "receive_window", "remote_ended", "send_window", "sent",
    )  # fmt: skip

    def __init__(self, owner: StreamOwner, writer: Http2FrameWriter, id: int, send_window: int, opened: float) -> None:
        self.id = id
        self.opened = opened
        self.send_window = send_window
        self.given = self.receive_window = STREAM_WINDOW
        self.sent = 0
        self.queued = 0
        self.remote_ended = False
        self.closed = False
        self.content_left: int | None = None
        self.handler: StreamHandler = IGNORE
        #: What messages of all connections may hold together; data to be sent is counted here.
        self.budget = owner.budget
        self._owner = owner
        self._writer = writer
        self._data: deque[Buffer] | None = None
        self._trailers: bytes | None = None
        self._enqueued = False

    @property
    def received(self) -> int:
        """How many bytes of DATA have arrived."""
        return self.given - self.receive_window

    @property
    def loop_budget(self) -> EventLoopBudget:
        """What says how much of a body is handled at once."""
        return self._owner.loop_budget

    # Sending

    def respond(self, headers: bytes, body: Sequence[Buffer], size: int, trailers: bytes) -> None:
        """Send a whole response: a header block, ``size`` bytes of DATA in parts, and the block of trailers."""
        writer = self._writer
        if size > self.send_window or size > writer.window or size > writer.frame_size or writer.paused:
            self.send_headers(headers)
            self.send(body, size)
            self.finish(trailers)
            return
        if writer.block_prefix:
            headers, writer.block_prefix = writer.block_prefix + headers, b""
        writer.window -= size
        writer.useful += 1
        writer.messages += 1
        writer.add(
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
        """Send the header block that begins the response."""
        self._write_headers(block, END_HEADERS)

    def send(self, body: Sequence[Buffer], size: int) -> None:
        """Queue ``size`` (at least one) bytes of DATA, given in parts."""
        if self._data is None:
            self._data = deque(body)
        else:
            self._data.extend(body)
        self.queued += size
        self._writer.messages += 1
        self.budget.take(size)
        if not self._enqueued and self.send_window > 0:
            self._enqueued = True
            self._writer.enqueue(self)

    def finish(self, block: bytes) -> None:
        """End the stream with a block of trailers, sent behind all queued data."""
        if self.queued:
            self._trailers = block
        else:
            self._write_headers(block, END_HEADERS | END_STREAM)
            self._ended()

    def reset(self, code: Http2ErrorCode) -> None:
        """End the stream at once; queued data is dropped, and the handler is not told."""
        if not self.closed:
            self._owner.on_stream_closed(self, answered=False)
            self._writer.write(rst_stream(self.id, code))

    def _write_headers(self, block: bytes, flags: int) -> None:
        writer = self._writer
        if writer.block_prefix:
            block, writer.block_prefix = writer.block_prefix + block, b""
        writer.useful += 1
        writer.write(FRAME.pack(len(block) << 8 | HEADERS, flags, self.id) + block)

    def _ended(self) -> None:
        self._owner.on_stream_closed(self, answered=True)
        if not self.remote_ended:
            # The client need not send the rest: the answer is complete (RFC 9113, 8.1).
            self._writer.write(rst_stream(self.id, Http2ErrorCode.NO_ERROR))

    # Called by the frame writer

    def take(self, size: int) -> list[Buffer]:
        """Remove the next ``size`` queued bytes, as parts that are not copied, and count them against the window."""
        data = self._data
        assert data is not None
        self.queued -= size
        self.send_window -= size
        self.sent += size
        self.budget.release(size)
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

    def on_dequeued(self) -> None:
        """The writer has removed the stream from its queue: all is sent, or the send window is used up."""
        self._enqueued = False
        if self.queued or self.closed:
            return
        if self._trailers is not None:
            self.finish(self._trailers)
        else:
            self.handler.on_drained()

    def increase_send_window(self, increment: int) -> None:
        """Allow ``increment`` more bytes (fewer if negative), as the client said; the caller has checked the sum."""
        self.send_window += increment
        if self.queued and not self._enqueued and self.send_window > 0:
            self._enqueued = True
            self._writer.enqueue(self)

    def discard(self) -> None:
        """Close the stream and drop its queued data."""
        self.closed = True
        # The handler holds the stream: without a cycle both are freed at once, not by the garbage collector.
        self.handler = IGNORE
        if self.queued:
            self.budget.release(self.queued)
            self.queued = 0
        self._data = None
        self._trailers = None

    # Receiving

    def receive(self, chunk: Buffer, last: bool) -> None:
        """Pass bytes of the body to the handler; ``last`` says that nothing follows."""
        if self.closed:
            return
        self.receive_window -= len(chunk)
        if last:
            self.remote_ended = True
        if chunk or last:
            self.handler.on_data(chunk)

    def raise_receive_window(self, size: int, needed: int = 0) -> None:
        """Let the client send ``size`` further bytes.

        A small increment is put off until it is worth a frame, unless the client cannot send the ``needed`` bytes
        without it.
        """
        increment = size - self.receive_window
        worth_it = increment >= STREAM_WINDOW // 2 or self.receive_window < min(needed, size)
        if worth_it and not self.remote_ended and not self.closed:
            self.receive_window += increment
            self.given += increment
            self._writer.useful += 1
            self._writer.write(window_update(self.id, increment))
