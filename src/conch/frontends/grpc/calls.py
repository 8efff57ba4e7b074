"""One gRPC call on a stream: its deadline, the messages that arrive, how it responds and ends.

``Call`` is any call, ``UnaryCall`` one with a single message each way; subclasses do the work
(:mod:`~conch.frontends.grpc.control`, ``infer``, ``stream_infer``).  Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from conch.errors import ConchError
from conch.frontends.access_log import AccessRecord
from conch.frontends.grpc.http2.frames import Http2ErrorCode
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.grpc.intake import MessageIntake
from conch.frontends.grpc.large import MAX_COMPRESSED_HERE, compress_large
from conch.frontends.grpc.messages import ENCODINGS, encode
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    UNREADABLE,
    CallFault,
    Status,
    response_headers,
    status_of,
    trailers,
)
from conch.tensors import Buffer

LOGGER: Final = logging.getLogger("conch")

_TOO_LATE: Final = "Deadline Exceeded"
_ACCEPTS: Final = ",".join(ENCODINGS).encode()


class Call(MessageIntake):
    """A call in progress; it sends nothing more once ``finished``."""

    __slots__ = (
        "_deadline", "_ending", "_loop", "_outbox", "_sender", "_started", "_uncompressed", "encoding", "head",
        "record",
    )  # fmt: skip

    def __init__(self, stream: Http2Stream, head: RequestHead, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(stream, head.encoding)
        self.head = head
        #: Compression of the messages sent.
        self.encoding = "identity"
        #: What verbose logging says of this call when it ends.
        self.record: AccessRecord | None = None
        self._loop = loop
        self._started = False
        #: Messages that are compressed elsewhere, and how they are sent then; and the status that comes behind them.
        self._outbox: deque[tuple[Sequence[Buffer], Callable[[list[Buffer], int], None]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._ending: tuple[Status, str] | None = None
        self._uncompressed = 0
        self._deadline: asyncio.TimerHandle | None = None
        if head.encoding not in ENCODINGS:
            self.fail(CallFault(Status.UNIMPLEMENTED, f"Compression algorithm '{head.encoding}' is not supported"))
        elif head.timeout == 0:
            self.fail(CallFault(Status.DEADLINE_EXCEEDED, _TOO_LATE))
        elif head.timeout is not None:
            self._deadline = loop.call_later(head.timeout, self._expire)

    # Implemented by subclasses

    def on_cancel(self) -> None:
        """Give the work up, because nobody waits for the response any more; called at most once."""
        raise NotImplementedError

    # Called by the stream

    def on_data(self, chunk: Buffer) -> None:
        if self.record is not None:
            self.record.received += len(chunk)
        super().on_data(chunk)

    def on_reset(self) -> None:
        if not self.finished:
            self._close("reset by the client")
            self.on_cancel()

    def on_stalled(self, message: str) -> None:
        if self.finished:
            # What waits to be read is the whole answer.
            self.stream.reset(Http2ErrorCode.CANCEL)
        else:
            self.abort(Status.DEADLINE_EXCEEDED, message)

    def on_drained(self) -> None:
        """Everything sent so far has left."""

    # Responding

    @property
    def unsent(self) -> int:
        """Bytes of messages that wait for the client, or to be compressed."""
        return self.stream.queued + self._uncompressed

    def send(self, body: Sequence[Buffer]) -> None:
        """Send a message, given in parts; more may follow."""
        if self._is_for_outbox(body):
            self._put_into_outbox(body, self._send_parts)
        elif not self.finished:
            self._send_parts(*encode(body, self.encoding))

    def _send_parts(self, parts: list[Buffer], size: int) -> None:
        if self.record is not None:
            self.record.sent += size
        if not self._started:
            self._started = True
            self.stream.send_headers(response_headers(self.encoding))
        self.stream.send(parts, size)

    def respond(self, body: Sequence[Buffer]) -> None:
        """Send the only message, given in parts, and the status OK."""
        if self._is_for_outbox(body):
            self._put_into_outbox(body, self._respond_with)
        elif not self.finished:
            self._respond_with(*encode(body, self.encoding))

    def _respond_with(self, parts: list[Buffer], size: int) -> None:
        if self.record is not None:
            self.record.sent += size
        self._close(Status.OK.name)
        headers = RESPONSE_HEADERS if self.encoding == "identity" else response_headers(self.encoding)
        self.stream.respond(headers, parts, size, OK_TRAILERS)

    def _is_for_outbox(self, body: Sequence[Buffer]) -> bool:
        """Whether a message is compressed elsewhere, or must wait behind one that is."""
        if self.encoding == "identity" or self.finished:
            return False
        return bool(self._outbox) or sum(map(len, body)) > MAX_COMPRESSED_HERE

    def _put_into_outbox(self, body: Sequence[Buffer], send: Callable[[list[Buffer], int], None]) -> None:
        self._uncompressed += sum(map(len, body))
        self._outbox.append((body, send))
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._empty_outbox())

    async def _empty_outbox(self) -> None:
        """Send what was put off, in order; each stays in the outbox until it is sent, for others to wait behind."""
        try:
            while self._outbox:
                body, send = self._outbox[0]
                parts, size = await compress_large(body, self.encoding)
                self._uncompressed -= sum(map(len, body))
                send(parts, size)
                self._outbox.popleft()
            self._sender = None
            if self._ending is not None:
                self.finish(*self._ending)
        except Exception as error:
            self._outbox.clear()
            self.fail(error)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call with a status, sent behind all messages."""
        if self.finished:
            return
        if self._outbox:
            self.paused = True
            self._ending = (status, message)
            return
        self._close(status.name)
        accepts = _ACCEPTS if self.head.encoding not in ENCODINGS else b""
        if status is Status.OK and not self._started:
            self.stream.send_headers(RESPONSE_HEADERS)
            self._started = True
        self.stream.finish(trailers(status, message, only=not self._started, accepts=accepts))

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error; one that is not expected (a bug) is logged as it is handled."""
        if not isinstance(error, ConchError | CallFault):
            LOGGER.exception("%s failed", self.head.path)
            error = CallFault(Status.INTERNAL, f"{type(error).__name__}: {error}")
        self.finish(*status_of(error))

    def abort(self, status: Status, message: str, code: Http2ErrorCode = Http2ErrorCode.CANCEL) -> None:
        """End the call with a status, and give up the work for it.

        If messages still wait to be sent, they are dropped and the stream is reset with ``code`` instead.
        """
        if self.finished:
            return
        if self.unsent:
            self._close(status.name)
            self.stream.reset(code)
        else:
            self.finish(status, message)
        self.on_cancel()

    def _expire(self) -> None:
        self._deadline = None
        self.abort(Status.DEADLINE_EXCEEDED, _TOO_LATE)

    def _close(self, status: str) -> None:
        self.close()
        if self.record is not None:
            self.record.status = status
            self.record.log()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._sender is not None:
            sender, self._sender = self._sender, None
            self._outbox.clear()
            # The sender itself closes the call when it sends the only message.
            if sender is not asyncio.current_task(self._loop):
                sender.cancel()


class UnaryCall(Call):
    """A call with one message each way; the client's starts the work, whatever follows is ignored."""

    __slots__ = ("_begun",)

    def __init__(self, stream: Http2Stream, head: RequestHead, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = False
        super().__init__(stream, head, loop)

    def run(self, message: Buffer) -> None:
        """Do the work; ``ConchError`` and ``CallFault`` end the call."""
        raise NotImplementedError

    @property
    def awaiting(self) -> bool:
        return not self._begun and self.can_read

    def on_message(self, data: Buffer) -> None:
        if not self._begun:
            self._begun = True
            self.run(data)

    def run_compressed(self, message: Buffer) -> None:
        """Do the work for a message that is too large to be inflated here."""
        raise NotImplementedError

    def on_compressed_message(self, data: Buffer) -> None:
        if not self._begun:
            self._begun = True
            self.run_compressed(data)

    def on_half_close(self) -> None:
        if not self._begun:
            raise CallFault(Status.INTERNAL, UNREADABLE)
