"""One gRPC call on a stream: its deadline, the messages that arrive, how it responds and ends.

``Call`` is any call, ``UnaryCall`` one with a single message each way; subclasses do the work
(:mod:`~conch.frontends.grpc.control`, ``infer``, ``stream_infer``).  Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from conch.errors import ConchError
from conch.frontends.access_log import AccessRecord
from conch.frontends.grpc.http2.frames import MAX_WINDOW, Http2ErrorCode
from conch.frontends.grpc.http2.limits import STREAM_WINDOW, MessageBudget
from conch.frontends.grpc.http2.streams import Http2Stream
from conch.frontends.grpc.messages import ENCODINGS, MessageReader, encode
from conch.frontends.grpc.requests import RequestHead
from conch.frontends.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallFault,
    Status,
    response_headers,
    status_of,
    trailers,
)
from conch.tensors import Buffer

LOGGER: Final = logging.getLogger("conch")

#: Triton's words for messages that are not protocol buffers, or incomplete.
UNREADABLE: Final = "Unable to parse request"

_TOO_LATE: Final = "Deadline Exceeded"
_ACCEPTS: Final = ",".join(ENCODINGS).encode()


class Call:
    """A call in progress; it sends nothing more once ``finished``, and handles no messages while ``paused``."""

    __slots__ = (
        "_deadline", "_ended", "_loop", "_put_off", "_reader", "_reservation", "_started", "encoding", "finished",
        "head", "paused", "record", "stream",
    )  # fmt: skip

    def __init__(self, stream: Http2Stream, head: RequestHead, loop: asyncio.AbstractEventLoop) -> None:
        self.stream = stream
        self.head = head
        self.finished = False
        self.paused = False
        #: Compression of the messages sent.
        self.encoding = "identity"
        #: What verbose logging says of this call when it ends.
        self.record: AccessRecord | None = None
        self._loop = loop
        self._reader = MessageReader(head.encoding)
        self._started = False
        self._ended = False
        #: Whether further messages wait for another turn of the loop.
        self._put_off = False
        #: ``True`` once the message that is arriving has its bytes reserved; ``None`` if it needs none.
        self._reservation: bool | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if head.encoding not in ENCODINGS:
            self.fail(CallFault(Status.UNIMPLEMENTED, f"Compression algorithm '{head.encoding}' is not supported"))
        elif head.timeout == 0:
            self.fail(CallFault(Status.DEADLINE_EXCEEDED, _TOO_LATE))
        elif head.timeout is not None:
            self._deadline = loop.call_later(head.timeout, self._expire)

    # Implemented by subclasses

    def on_message(self, data: bytes) -> None:
        """Handle a message; whatever is raised ends the call."""
        raise NotImplementedError

    def on_half_close(self) -> None:
        """The client has sent everything, and all of its messages have been handled."""
        raise NotImplementedError

    def on_cancel(self) -> None:
        """Give the work up, because nobody waits for the response any more; called at most once."""
        raise NotImplementedError

    # Called by the stream

    def on_data(self, chunk: Buffer) -> None:
        if not self.finished:
            if self.record is not None:
                self.record.received += len(chunk)
            self._reader.feed(chunk)
            self._read()

    def on_reset(self) -> None:
        if not self.finished:
            self._close("reset by the client")
            self.on_cancel()

    def on_drained(self) -> None:
        """Everything sent so far has left."""

    # Reading

    def resume(self) -> None:
        """Handle messages again, from the next turn of the event loop on."""
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if self.paused and not self.finished:
            self.paused = False
            self._read()

    def _continue(self) -> None:
        """Handle the messages that were put off."""
        self._put_off = False
        if not self.finished:
            self._read()

    def _read(self) -> None:
        reader = self._reader
        stream = self.stream
        try:
            while not self.paused and not self._put_off and (message := reader.next()) is not None:
                if self._reservation is not None:
                    self._release(stream.budget)
                self.on_message(message)
                if self.finished:
                    return
                if reader.held and stream.turns.over():
                    self._put_off = True
                    stream.turns.later(self._continue)
            if not stream.remote_ended:
                self._open_window()
            elif not self.paused and not self._put_off and not self._ended:
                self._ended = True
                if reader.held or reader.missing:
                    raise CallFault(Status.INTERNAL, UNREADABLE)
                self.on_half_close()
        except Exception as error:
            self.fail(error)

    def _open_window(self) -> None:
        """Let the client send more: a window less what is held, or all of a message whose bytes are reserved."""
        reader = self._reader
        if self._reservation is None and reader.missing > self.stream.receive_window:
            self._reservation = False
            self.stream.budget.request(self, reader.missing + reader.held, self._on_granted)
        if self._reservation:
            self.stream.raise_receive_window(min(STREAM_WINDOW + reader.missing, MAX_WINDOW))
        else:
            self.stream.raise_receive_window(STREAM_WINDOW - reader.held)

    def _on_granted(self) -> None:
        self._reservation = True
        self._open_window()

    def _release(self, budget: MessageBudget) -> None:
        self._reservation = None
        budget.release(self)

    # Responding

    def send(self, body: Sequence[Buffer]) -> None:
        """Send a message, given in parts; more may follow."""
        if self.finished:
            return
        parts, size = encode(body, self.encoding)
        if self.record is not None:
            self.record.sent += size
        if not self._started:
            self._started = True
            self.stream.send_headers(response_headers(self.encoding))
        self.stream.send(parts, size)

    def respond(self, body: Sequence[Buffer]) -> None:
        """Send the only message, given in parts, and the status OK."""
        if self.finished:
            return
        parts, size = encode(body, self.encoding)
        if self.record is not None:
            self.record.sent += size
        self._close(Status.OK.name)
        headers = RESPONSE_HEADERS if self.encoding == "identity" else response_headers(self.encoding)
        self.stream.respond(headers, parts, size, OK_TRAILERS)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call with a status, sent behind all messages."""
        if self.finished:
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
        if self.stream.queued:
            self._close(status.name)
            self.stream.reset(code)
        else:
            self.finish(status, message)
        self.on_cancel()

    def _expire(self) -> None:
        self._deadline = None
        self.abort(Status.DEADLINE_EXCEEDED, _TOO_LATE)

    def _close(self, status: str) -> None:
        self.finished = True
        if self.record is not None:
            self.record.status = status
            self.record.log()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._reservation is not None:
            self._release(self.stream.budget)


class UnaryCall(Call):
    """A call with one message each way; the client's starts the work, whatever follows is ignored."""

    __slots__ = ("_begun",)

    def __init__(self, stream: Http2Stream, head: RequestHead, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = False
        super().__init__(stream, head, loop)

    def run(self, message: bytes) -> None:
        """Do the work; ``ConchError`` and ``CallFault`` end the call."""
        raise NotImplementedError

    def on_message(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self.run(data)

    def on_half_close(self) -> None:
        if not self._begun:
            raise CallFault(Status.INTERNAL, UNREADABLE)
