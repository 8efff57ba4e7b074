"""Received messages of a call: when they are read, how much the client may send, and how they count in the budget.

``Call`` is the only subclass of :class:`MessageIntake`. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import monotonic
from typing import Any, Final

from conch.core.errors import ConchError
from conch.core.tensors import Buffer
from conch.frontends.access_log import AccessRecord
from conch.frontends.budget import SMALL, BudgetWait, ByteBudget
from conch.frontends.grpc.large import inflate_here
from conch.frontends.grpc.messages import NOTHING_READ, PREFIX, MessageReader, whole_message
from conch.frontends.grpc.status import UNREADABLE, CallFault, Status
from conch.http2 import MESSAGE_WINDOW, STREAM_WINDOW, Http2Stream

#: Calls that hold at most this (bytes) are never refused for lack of budget, for example health checks.
_TINY: Final = 1 << 10


class MessageIntake:
    """Reads the messages of a call; handles none while ``paused``.

    ``held`` counts the bytes of the call in the server's budget: those that have arrived and were not released.
    ``message_size`` is the size of the message being handled (bytes). ``began`` is when the call was opened or its last
    request was handled (ns, monotonic), set only while requests are traced.
    """

    __slots__ = (
        "_budget", "_encoding", "_ended", "_put_off", "_reader", "_since", "_task", "_waiting", "began", "finished",
        "held", "message_size", "paused", "record", "stream",
    )  # fmt: skip

    began: int

    def __init__(self, stream: Http2Stream, encoding: str, budget: ByteBudget) -> None:
        self.stream = stream
        #: The access log record of this call.
        self.record: AccessRecord | None = None
        self._budget = budget
        self.finished = False
        self.paused = False
        self.held = 0
        self.message_size = 0
        self._encoding = encoding
        #: Assembles messages once one has arrived in parts.
        self._reader = NOTHING_READ
        self._ended = False
        #: Whether further messages wait for another iteration of the loop, or for a message that is decoded elsewhere.
        self._put_off = False
        self._task: asyncio.Task[None] | None = None
        #: When the arriving message was found to be large (s), 0 if it is not.
        self._since = 0.0
        #: Set while the server's budget is exhausted.
        self._waiting: BudgetWait | None = None

    # Implemented by subclasses

    def on_message(self, data: Buffer) -> None:
        """Handle a message; any error ends the call."""
        raise NotImplementedError

    def on_compressed_message(self, data: Buffer) -> None:
        """Handle a message that is too large to be decompressed here."""
        raise NotImplementedError

    def on_half_close(self) -> None:
        """Handle the end of the client's messages; called when all of them have been handled."""
        raise NotImplementedError

    def on_decoded(self, decoded: Any) -> None:
        """Handle the result of :meth:`decode_later`."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error."""
        raise NotImplementedError

    # Called by the stream

    @property
    def awaited(self) -> int | None:
        """The position in the body of a message whose rest the client must send; None if nothing is missing."""
        owes = (self._reader.held or self._reader.missing) and self.can_read
        return self.stream.received - self._reader.held if owes else None

    @property
    def can_read(self) -> bool:
        """Whether only the client delays the next message."""
        return not self.paused and not self._put_off and self._waiting is None

    def on_data(self, chunk: Buffer) -> None:
        if self.finished:
            return
        size = len(chunk)
        self.held += size
        if self.record is not None:
            self.record.received += size
        if not self._budget.take(size) and self._budget.overdrawn and self.held > _TINY:
            self._refuse_for_bytes(self._budget.refusal())
            return
        message = whole_message(chunk) if self._reader is NOTHING_READ and self.can_read else None
        if message is None:
            if self._reader is NOTHING_READ:
                self._reader = MessageReader(self._encoding)
            self._reader.feed(chunk)
            self._read()
            return
        self.message_size = size
        try:
            self.on_message(message)
            if not self.finished:
                self._end_reading()
        except Exception as error:
            self.fail(error)

    # Called by subclasses

    def resume(self) -> None:
        """Handle messages again from a later iteration of the event loop."""
        self.stream.loop_budget.later(self._resume)

    def count_decoded(self, size: int) -> None:
        """Count a message at its decompressed ``size``; raises ``CallFault`` if the budget is exhausted."""
        grown = size + PREFIX.size - self.message_size
        if grown > 0:
            self.message_size += grown
            self.held += grown
            if not self._budget.take(grown) and self._budget.overdrawn:
                raise CallFault(Status.RESOURCE_EXHAUSTED, self._budget.refusal().message)

    def hold(self, size: int) -> None:
        """Count further bytes held for this call. Raises UNAVAILABLE if the budget is exhausted."""
        self.held += size
        if not self._budget.take(size):
            raise self._budget.refusal()

    def release(self, size: int) -> None:
        """Return bytes to the budget; does nothing once the call has ended, which returns all."""
        if not self.finished:
            self.held -= size
            self._budget.release(size)

    def close(self) -> None:
        """End the call: stop reading and return its bytes to the budget."""
        self.finished = True
        if self.held:
            self._budget.release(self.held)
            self.held = 0
        self._leave_queue()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def decode_later(self, decoding: Awaitable[Any]) -> None:
        """Handle the result of ``decoding`` when it is complete, and no further message before that."""
        self._put_off = True
        self._task = asyncio.ensure_future(self._decode(decoding))

    # Reading

    async def _decode(self, decoding: Awaitable[Any]) -> None:
        try:
            decoded = await decoding
            # The call may end here, and must not cancel its own task.
            self._task = None
            if not self.finished:
                self.on_decoded(decoded)
        except Exception as error:
            self._task = None
            self.fail(error)
        self._continue()

    def _resume(self) -> None:
        if self.paused and not self.finished:
            self.paused = False
            self._read()

    def _continue(self) -> None:
        """Handle the queued messages."""
        self._put_off = False
        if not self.finished:
            self._read()

    def _read(self) -> None:
        reader = self._reader
        try:
            while not self.paused and not self._put_off and (message := reader.next()) is not None:
                self._leave_queue()  # all of it has come, and must not be refused any more
                self.message_size = len(message) + PREFIX.size
                if reader.compressed:
                    self._on_compressed(message)
                else:
                    self.on_message(message)
                if self.finished:
                    return
                if reader.held and not self._put_off and self.stream.loop_budget.over():
                    self._put_off = True
                    self.stream.loop_budget.later(self._continue)
            self._end_reading()
        except Exception as error:
            self.fail(error)

    def _end_reading(self) -> None:
        """Let the client send more, or handle the end of its messages."""
        if not self.stream.remote_ended:
            self._open_window()
        elif not self.paused and not self._put_off and not self._ended:
            self._ended = True
            if self._reader.held or self._reader.missing:
                raise CallFault(Status.INTERNAL, UNREADABLE)
            self.on_half_close()

    def _on_compressed(self, message: Buffer) -> None:
        plain = inflate_here(message, self._reader.encoding)
        if plain is None:
            self.on_compressed_message(message)
        else:
            self.on_message(plain)

    # Flow control

    def _open_window(self) -> None:
        """Let the client send more: a window less the held bytes, or more of a large message while there is budget."""
        reader, stream = self._reader, self.stream
        if not reader.large:
            self._since = 0.0
            stream.raise_receive_window(STREAM_WINDOW - reader.held, reader.missing)
        elif self._waiting is None:
            if not self._since:
                self._since = monotonic()
            if self.held > SMALL and self._budget.used >= self._budget.size:
                self._waiting = self._budget.wait(self._since, self._on_room, self._refuse_for_bytes)
            else:
                stream.raise_receive_window(min(STREAM_WINDOW + reader.missing, MESSAGE_WINDOW))

    def _leave_queue(self) -> None:
        if self._waiting is not None:
            self._budget.cancel(self._waiting)
            self._waiting = None

    def _on_room(self) -> None:
        self._waiting = None
        self.stream.raise_receive_window(STREAM_WINDOW + min(self._reader.missing, self.stream.receive_window))

    def _refuse_for_bytes(self, error: ConchError) -> None:
        """End the call for lack of budget."""
        self._waiting = None
        self.fail(CallFault(Status.RESOURCE_EXHAUSTED, error.message))
