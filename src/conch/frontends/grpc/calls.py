"""A gRPC call on a stream: its deadline, received messages, responses and end.

``Call`` is any call, ``UnaryCall`` a call with a single message each way; subclasses implement the RPCs
(:mod:`~conch.frontends.grpc.control`, ``infer``, ``stream_infer``). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Final, Literal

from conch.core.errors import ConchError, cancelled, error_text
from conch.core.inference import InferRequest
from conch.core.tensors import Buffer
from conch.frontends.budget import ByteBudget
from conch.frontends.forwarding import HeaderForwarding
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
from conch.frontends.offloading.offloader import Offloader, has_many_strings
from conch.http2 import Http2ErrorCode, Http2Stream
from conch.machine import logs
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.telemetry.tracing.trace import GRPC
from conch.telemetry.tracing.tracing import Tracing


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The server and the options for inference: ``forwarding`` and ``compression`` (its level).

    ``budget`` counts the bytes that calls hold, ``max_decompressed`` limits decompressed messages (bytes).
    ``offloader`` decodes slow messages. ``tasks`` keeps the background tasks of calls alive until they are done.
    """

    server: InferenceServer
    loop: asyncio.AbstractEventLoop
    budget: ByteBudget
    forwarding: HeaderForwarding
    compression: str
    max_decompressed: int
    offloader: Offloader
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


# A call creates an ``Outbox`` for its first message that is compressed elsewhere; runs on the event loop.


#: Sends an encoded message: its parts and their size.
SendParts = Callable[[list[Buffer], int], None]


class Outbox:
    """Compresses and sends messages in order; ``size`` counts the bytes that are not compressed yet.

    Calls ``on_empty`` after the last message, or ``on_error`` if one cannot be sent.
    """

    def __init__(self, encoding: str, on_empty: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self.size = 0
        self._encoding = encoding
        self._on_empty = on_empty
        self._on_error = on_error
        self._waiting: deque[tuple[Sequence[Buffer], SendParts]] = deque()
        self._task = asyncio.ensure_future(self._send_all())

    def put(self, body: Sequence[Buffer], send: SendParts) -> None:
        """Compress a message, then call ``send`` with it."""
        self.size += sum(map(len, body))
        self._waiting.append((body, send))

    def close(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        # Sending may itself end the call.
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                body, send = self._waiting.popleft()
                parts, size = await compress_large(body, self._encoding)
                self.size -= sum(map(len, body))
                send(parts, size)
        except Exception as error:
            self._waiting.clear()
            self._on_error(error)
        else:
            self._on_empty()


LOGGER: Final = logging.getLogger("conch")

_TOO_LATE: Final = "Deadline Exceeded"
_ACCEPTS: Final = ",".join(ENCODINGS).encode()


class Call(MessageIntake):
    """A call in progress; it sends nothing more once ``finished``."""

    __slots__ = ("_counting", "_deadline", "_ending", "_loop", "_outbox", "_started", "encoding", "head")

    def __init__(self, stream: Http2Stream, head: RequestHead, context: ServingContext) -> None:
        super().__init__(stream, head.encoding, context.budget)
        self.head = head
        #: Compression of sent messages.
        self.encoding = "identity"
        self._loop = context.loop
        self._started = False
        #: Messages that are compressed elsewhere, and the status that follows them.
        self._outbox: Outbox | None = None
        self._ending: tuple[Status, str] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        #: Requests with long BYTES inputs in shared memory, until these are counted.
        self._counting: set[asyncio.Task[None]] = set()
        if head.encoding not in ENCODINGS:
            self.fail(CallFault(Status.UNIMPLEMENTED, f"Compression algorithm '{head.encoding}' is not supported"))
        elif head.timeout == 0:
            self.fail(CallFault(Status.DEADLINE_EXCEEDED, _TOO_LATE))
        elif head.timeout is not None:
            self._deadline = context.loop.call_later(head.timeout, self._expire)

    # Implemented by subclasses

    def on_cancel(self) -> None:
        """Cancel the work, because the client no longer waits for the response; called at most once."""
        raise NotImplementedError

    # Called by the stream

    def on_reset(self) -> None:
        if not self.finished:
            self._close("reset by the client")
            self.on_cancel()

    def on_stalled(self, message: str) -> None:
        if self.finished:
            # The data that waits to be read is the end of the response.
            self.stream.reset(Http2ErrorCode.CANCEL)
        else:
            self.abort(Status.DEADLINE_EXCEEDED, message)

    def on_drained(self) -> None:
        """Handle the end of sending; called when all data has been sent."""

    # Requests

    def begin_trace(self, tracing: Tracing, request: InferRequest) -> None:
        """Begin the trace of a request, if it is sampled, before its model gets it."""
        if tracing.on:
            now = monotonic_ns()
            # Missing if tracing was enabled after the call was opened.
            tracing.begin(request, GRPC, getattr(self, "began", now), dict(self.head.metadata))
            self.began = now

    def infer(
        self, offloader: Offloader, model: Model, request: InferRequest, refuse: Callable[[ConchError], None]
    ) -> None:
        """Pass a request to its model; raises ConchError if the model refuses it.

        BYTES inputs in shared memory that take long to count are counted first, in a process; the model's error then
        goes to ``refuse``.
        """
        if any(map(has_many_strings, request.inputs.values())):
            counting = self._loop.create_task(self._infer_counted(offloader, model, request, refuse))
            self._counting.add(counting)
            counting.add_done_callback(self._counting.discard)
        else:
            model.infer(request)

    async def _infer_counted(
        self, offloader: Offloader, model: Model, request: InferRequest, refuse: Callable[[ConchError], None]
    ) -> None:
        try:
            with model.held():
                try:
                    await offloader.count_strings(request)
                except BaseException:
                    if request.trace is not None:
                        request.trace.refused()
                    raise
                model.infer(request)
        except asyncio.CancelledError:
            refuse(cancelled())
        except ConchError as error:
            refuse(error)
        except Exception as error:
            self.fail(error)

    # Responding

    @property
    def unsent(self) -> int:
        """Bytes of messages that wait for the client or for compression."""
        return self.stream.queued + (self._outbox.size if self._outbox is not None else 0)

    def send(self, body: Sequence[Buffer]) -> None:
        """Send a message, given in parts; more may follow."""
        if self.finished or (self.encoding != "identity" and self._put_into_outbox(body, self._send_parts)):
            return
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
        if self.finished or (self.encoding != "identity" and self._put_into_outbox(body, self._respond_with)):
            return
        parts, size = encode(body, self.encoding)
        self._respond_with(parts, size)

    def _respond_with(self, parts: list[Buffer], size: int) -> None:
        if self.record is not None:
            self.record.sent += size
        self._close(Status.OK.name)
        headers = RESPONSE_HEADERS if self.encoding == "identity" else response_headers(self.encoding)
        self.stream.respond(headers, parts, size, OK_TRAILERS)

    def _put_into_outbox(self, body: Sequence[Buffer], send: SendParts) -> bool:
        """Queue a message that is compressed elsewhere, or that follows such a message; False if neither applies."""
        if self._outbox is None:
            if sum(map(len, body)) <= MAX_COMPRESSED_HERE:
                return False
            self._outbox = Outbox(self.encoding, self._on_outbox_empty, self._on_outbox_error)
        self._outbox.put(body, send)
        return True

    def _on_outbox_empty(self) -> None:
        self._outbox = None
        if self._ending is not None:
            self.finish(*self._ending)

    def _on_outbox_error(self, error: Exception) -> None:
        self._outbox = None
        self.fail(error)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call with a status, sent after all messages."""
        if self.finished:
            return
        if self._outbox is not None:
            # Nothing more is read; the status follows the queued messages.
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
        """End the call with the status of an error; an unexpected error (a bug) is logged with its traceback."""
        if not isinstance(error, ConchError | CallFault):
            LOGGER.exception("%s failed", self.head.path)
            error = CallFault(Status.INTERNAL, error_text(error))
        self.finish(*status_of(error))

    def abort(self, status: Status, message: str, code: Http2ErrorCode = Http2ErrorCode.CANCEL) -> None:
        """End the call with a status and cancel its work.

        If messages are still waiting to be sent, they are dropped and the stream is reset with ``code`` instead.
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
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for counting in self._counting:
            counting.cancel()


class UnaryCall(Call):
    """A call with one message each way; the client's message starts the work, further ones are ignored."""

    __slots__ = ("_has_started", "_stop_waiting")

    def __init__(self, stream: Http2Stream, head: RequestHead, context: ServingContext) -> None:
        self._has_started = False
        #: Stops waiting for a model to be loaded.
        self._stop_waiting: Callable[[], None] | None = None
        super().__init__(stream, head, context)

    def run(self, message: Buffer) -> None:
        """Do the work; ``ConchError`` and ``CallFault`` end the call."""
        raise NotImplementedError

    @property
    def awaited(self) -> int | None:
        return 0 if not self._has_started and self.can_read else None

    def on_message(self, data: Buffer) -> None:
        if not self._has_started:
            self._has_started = True
            self.run(data)

    def run_compressed(self, message: Buffer) -> None:
        """Do the work for a message that is too large to be decompressed here."""
        raise NotImplementedError

    def on_compressed_message(self, data: Buffer) -> None:
        if not self._has_started:
            self._has_started = True
            self.run_compressed(data)

    def on_half_close(self) -> None:
        if not self._has_started:
            raise CallFault(Status.INTERNAL, UNREADABLE)

    def wait_for(self, needed: LoadNeeded, again: Callable[[], None]) -> None:
        """Call ``again`` when the required model is loaded; if its load fails, the call fails."""
        self._stop_waiting = needed.then(partial(self._proceed, again))

    def _proceed(self, again: Callable[[], None], load_error: ConchError | None) -> None:
        self._stop_waiting = None
        if self.finished:
            return
        try:
            if load_error is not None:
                raise load_error
            again()
        except Exception as error:
            self.fail(error)

    def on_cancel(self) -> None:
        stop_waiting, self._stop_waiting = self._stop_waiting, None
        if stop_waiting is not None:
            stop_waiting()


#: Triton's names of the kinds of calls.
Handler = Literal["ModelInferHandler", "ModelStreamInferHandler"]
#: The function of each kind that handles a response.
_TAKES_RESPONSE = {
    "ModelInferHandler": "ModelInferHandler::InferResponseComplete",
    "ModelStreamInferHandler": "ModelStreamInferHandler::StreamInferResponseComplete",
}


def cancel_requests(handler: Handler, requests: Collection[InferRequest]) -> None:
    """Cancel the in-flight requests of a call."""
    first = next((request.serial for request in requests), 0)
    if first:
        logs.verbose(1, "Cancellation notification received for %s", _state(handler, first, "ISSUED"))
    for request in requests:
        logs.verbose(1, "Issuing cancellation for %d", request.serial)
        request.cancel()


def log_early_cancellation(handler: Handler) -> None:
    """Log the cancellation of a call that has no request yet: its message is being decoded, or its model loaded."""
    logs.verbose(1, "Cancellation notification received for %s", _state(handler, 0, "START"))
    logs.verbose(1, "Completing cancellation for %s", _state(handler, 0, "START"))


def log_skipped_response(handler: Handler, serial: int, *, final: bool) -> None:
    """Log that the response of a cancelled request is not sent; the ``final`` one ends its cancellation."""
    where = f"{_TAKES_RESPONSE[handler]}, {serial}"
    logs.verbose(1, "%s, skipping response generation as grpc transaction was cancelled... ", where)
    if final:
        logs.verbose(1, "Completing cancellation for %s", _state(handler, serial, "CANCELLED"))


def _state(handler: Handler, serial: int, step: str) -> str:
    return f"{handler}, rpc_ok=1, context 0, {serial} step {step}"
