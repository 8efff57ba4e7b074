"""An HTTP/2 stream: its windows, its queued data, and the application that handles received data.

A connection creates one for every request; calls respond through it. Runs on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from conch.core.tensors import Buffer
from conch.http2.frame_writer import Http2FrameWriter
from conch.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    Http2ErrorCode,
    rst_stream,
    window_update,
)
from conch.http2.headers import Field
from conch.http2.limits import STREAM_WINDOW, ByteCounter, LoopBudget


class StreamHandler(Protocol):
    """Handles the events of a stream, on the event loop."""

    @property
    def awaited(self) -> int | None:
        """The position in the body of an incomplete message whose rest the client must send.

        None if nothing is missing, or if something else than the client delays it.
        """

    def on_stalled(self, message: str) -> None:
        """Handle a client that exceeded the time limit for sending or reading; ``message`` names the limit."""

    def on_data(self, chunk: Buffer) -> None:
        """Handle the next bytes of the body; they are empty only at its end, when ``stream.remote_ended`` is set."""

    def on_reset(self) -> None:
        """Handle a reset by the client, or the end of its connection; nothing can be sent any more."""

    def on_drained(self) -> None:
        """Handle the end of sending; called when all queued data has been sent."""


class _IgnoringHandler:
    """Ignores the events of a stream that has ended, or that was refused when it was opened."""

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
    """The part of a connection that its streams use.

    ``budget`` counts data waiting to be sent. All connections share it, and ``loop_budget``.
    """

    budget: ByteCounter
    loop_budget: LoopBudget

    def on_stream_closed(self, stream: Http2Stream, *, completed: bool) -> None:
        """Handle the end of a stream that the server has ended (``completed``) or reset."""


class Http2Stream:
    """A request and its response.

    ``queued`` counts the bytes of DATA that wait to be sent; ``send_window`` and ``receive_window`` are the bytes that
    flow control allows. ``remote_ended`` is true when the client has sent everything, ``closed`` when nothing can be
    sent. ``opened`` is the start time (s, by the loop's clock). ``granted`` is the sum of the receive windows, ``sent``
    the number of queued bytes that have been sent. ``content_left`` counts the remaining bytes of the body, None if the
    client has announced no length.
    """

    __slots__ = (
        "_budget", "_data", "_enqueued", "_owner", "_trailers", "_writer", "closed", "content_left", "granted",
        "handler", "id", "opened", "queued", "receive_window", "remote_ended", "send_window", "sent",
    )  # fmt: skip

    def __init__(self, owner: StreamOwner, writer: Http2FrameWriter, id: int, send_window: int, opened: float) -> None:
        self.id = id
        self.opened = opened
        self.send_window = send_window
        self.granted = self.receive_window = STREAM_WINDOW
        self.sent = 0
        self.queued = 0
        self.remote_ended = False
        self.closed = False
        self.content_left: int | None = None
        self.handler: StreamHandler = IGNORE
        self._budget = owner.budget
        self._owner = owner
        self._writer = writer
        self._data: deque[Buffer] | None = None
        self._trailers: bytes | None = None
        self._enqueued = False

    @property
    def received(self) -> int:
        """Bytes of DATA received."""
        return self.granted - self.receive_window

    @property
    def loop_budget(self) -> LoopBudget:
        """The budget that limits how much of a body is handled at once."""
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
        self._budget.take(size)
        if not self._enqueued and self.send_window > 0:
            self._enqueued = True
            self._writer.enqueue(self)

    def finish(self, block: bytes) -> None:
        """End the stream with a block of trailers, sent after all queued data."""
        if self.queued:
            self._trailers = block
        else:
            self._write_headers(block, END_HEADERS | END_STREAM)
            self._ended()

    def reset(self, code: Http2ErrorCode) -> None:
        """End the stream at once; drops queued data and does not notify the handler."""
        if not self.closed:
            self._owner.on_stream_closed(self, completed=False)
            self._writer.write(rst_stream(self.id, code))

    def _write_headers(self, block: bytes, flags: int) -> None:
        writer = self._writer
        if writer.block_prefix:
            block, writer.block_prefix = writer.block_prefix + block, b""
        writer.useful += 1
        writer.write(FRAME.pack(len(block) << 8 | HEADERS, flags, self.id) + block)

    def _ended(self) -> None:
        self._owner.on_stream_closed(self, completed=True)
        if not self.remote_ended:
            # The client need not send the rest, as the response is complete (RFC 9113, 8.1).
            self._writer.write(rst_stream(self.id, Http2ErrorCode.NO_ERROR))

    # Called by the frame writer

    def take(self, size: int) -> list[Buffer]:
        """Remove the next ``size`` queued bytes, as parts that are not copied, and count them against the window."""
        data = self._data
        assert data is not None
        self.queued -= size
        self.send_window -= size
        self.sent += size
        self._budget.release(size)
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
        """Handle the removal from the writer's queue: all data is sent, or the send window is exhausted."""
        self._enqueued = False
        if self.queued or self.closed:
            return
        if self._trailers is not None:
            self.finish(self._trailers)
        else:
            self.handler.on_drained()

    def increase_send_window(self, increment: int) -> None:
        """Add ``increment`` bytes (negative for fewer) to the send window; the caller has checked the sum."""
        self.send_window += increment
        if self.queued and not self._enqueued and self.send_window > 0:
            self._enqueued = True
            self._writer.enqueue(self)

    def discard(self) -> None:
        """Close the stream and drop its queued data."""
        self.closed = True
        # The handler refers to the stream: breaking the cycle frees both at once, without the garbage collector.
        self.handler = IGNORE
        if self.queued:
            self._budget.release(self.queued)
            self.queued = 0
        self._data = None
        self._trailers = None

    # Receiving

    def receive(self, chunk: Buffer, last: bool) -> None:
        """Pass bytes of the body to the handler; ``last`` marks the end."""
        if self.closed:
            return
        self.receive_window -= len(chunk)
        if last:
            self.remote_ended = True
        if chunk or last:
            self.handler.on_data(chunk)

    def raise_receive_window(self, size: int, needed: int = 0) -> None:
        """Raise the receive window to ``size`` bytes.

        A small increment is deferred until it is worth a frame, unless the client cannot send the ``needed`` bytes
        without it.
        """
        increment = size - self.receive_window
        worth_it = increment >= STREAM_WINDOW // 2 or self.receive_window < min(needed, size)
        if worth_it and not self.remote_ended and not self.closed:
            self.receive_window += increment
            self.granted += increment
            self._writer.useful += 1
            self._writer.write(window_update(self.id, increment))


class Http2Application(Protocol):
    """Serves the requests of connections, on the event loop."""

    def parse(self, fields: Sequence[Field]) -> Any:
        """Parse the header fields of a request into an immutable head of the application's own type.

        Raises ``StreamFault`` for malformed fields.
        """

    def check_trailers(self, fields: Sequence[Field]) -> None:
        """Raise ``StreamFault`` for fields that may not end a request."""

    def open(self, stream: Http2Stream, head: Any) -> StreamHandler:
        """Begin to serve a request; returns the handler of its stream."""
