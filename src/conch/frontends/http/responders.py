"""Write the responses of ``infer``, ``generate`` and ``generate_stream`` requests to their exchanges.

The handlers (``inference.py``) create the responders; each response calls its responder on the event loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from conch.core.errors import ConchError, internal, invalid
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import Buffer
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.dialects import STATUS, refuse
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.model_requests import RequestsResponder
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.control import error_body
from conch.wire.json.generate import NOT_ONE_RESPONSE, Layout, encode_generate, encode_texts, server_sent_event
from conch.wire.json.infer import JsonOutputPlan

LOG = logging.getLogger("conch")

BINARY: Final = (b"Content-Type", b"application/octet-stream")
EVENTS: Final = (b"Content-Type", b"text/event-stream; charset=utf-8")
_NO_CACHE: Final = (b"Cache-Control", b"no-cache")
#: A stream is aborted when its client leaves more than this unread (bytes).
UNREAD_LIMIT: Final = 64 << 20


def send_events(exchange: HttpExchange, events: bytes, model: str) -> None:
    """Begin or continue a stream of events; abort it if its client reads too slowly. ``model`` is for the log."""
    if not events:
        return
    if not exchange.started:
        exchange.start(200, [EVENTS, _NO_CACHE])
    exchange.write(events)
    if exchange.unsent > UNREAD_LIMIT:
        LOG.warning("the client of a stream of '%s' does not read; cancelling its request", model)
        exchange.abort()


class EncodedResponse(NamedTuple):
    """The body of a 200 response; ``header_size`` is the size of the JSON before binary tensors, 0 without them."""

    header_size: int
    parts: Sequence[Buffer]
    encoding: str

    def send(self, exchange: HttpExchange) -> None:
        """Send this as the response of an exchange, with the headers of the client's platform."""
        if not self.header_size:
            headers = [JSON]
        elif exchange.binary_type:
            headers = [(b"Content-Type", exchange.binary_type + b"%d" % self.header_size)]
        else:
            headers = [BINARY, (b"Inference-Header-Content-Length", b"%d" % self.header_size)]
        if self.encoding != "identity":
            headers.append((b"Content-Encoding", self.encoding.encode()))
        exchange.respond(200, headers, *self.parts)


class Responder:
    """Writes the responses of a request to its exchange, or the error that occurs while writing."""

    __slots__ = ("_exchange", "request")

    request: InferRequest

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange

    def on_response(self, response: InferResponse) -> None:
        exchange = self._exchange
        try:
            self._write(response)
        except ConchError as error:
            refuse(exchange, error)
        except Exception:
            LOG.exception("a response of '%s' could not be written", self.request.model_name)
            if exchange.started:
                exchange.abort()
            else:
                refuse(exchange, internal("the response could not be written"))

    def _write(self, response: InferResponse) -> None:
        """Write or keep a response; ``ConchError`` refuses the exchange."""
        raise NotImplementedError


class InferResponder(Responder):
    """``infer``: one response, whose final flag may arrive separately."""

    __slots__ = ("_kept", "_model", "_offloader", "message", "plan")

    plan: JsonOutputPlan
    #: The complete message of the client, for a model whose repeated messages are cached.
    message: tuple[bytes, bytes | None, bytes | None] | None

    def __init__(self, exchange: HttpExchange, model: Model, offloader: Offloader) -> None:
        super().__init__(exchange)
        self._model = model
        self._offloader = offloader
        self._kept: list[InferResponse] | None = None
        self.message = None

    def _write(self, response: InferResponse) -> None:
        if not response.final or self._kept is not None:
            self._collect(response)
            return
        if response.error is not None:
            raise response.error
        if self.request.shared is not None:
            self.request.shared.deliver(response)
        accepted = self._exchange.headers.get(b"accept-encoding")
        encoding = compression.negotiate(accepted.decode("latin-1")) if accepted is not None else "identity"
        size = _size(response) if encoding != "identity" or not self._binary(response) else 0
        start_work(
            self._exchange, self._encode(size, response, encoding), cancel_on_disconnect=True, held=self._model.held
        )

    async def _encode(self, size: int, response: InferResponse, encoding: str) -> None:
        labels = {
            name: labels
            for name, output in self.plan.outputs.items()
            if output.classification and (labels := self._model.labels(name)) is not None
        }
        header_size, parts = await self._offloader.run(
            size, work.encode_infer, self.request, response, self.plan, labels, encoding
        )
        self._respond(EncodedResponse(header_size, parts, encoding))

    def _respond(self, encoded: EncodedResponse) -> None:
        encoded.send(self._exchange)
        if self.message is not None and self._model.cached_messages is not None:
            size = len(self.message[0]) + sum(map(len, encoded.parts))
            self._model.cached_messages.keep(self.request, self.message, encoded, size)

    def _binary(self, response: InferResponse) -> bool:
        """Whether no output of a response is written as JSON."""
        plan = self.plan
        if not plan.outputs:
            return plan.binary
        requested = [plan.outputs[tensor.name] for tensor in response.outputs if tensor.name in plan.outputs]
        return all(output.binary and not output.classification for output in requested)

    def _collect(self, response: InferResponse) -> None:
        """Keep the only response until the request completes, then write it."""
        kept = self._kept if self._kept is not None else []
        self._kept = kept
        if not response.empty or _is_only_response(response, len(kept), decoupled=False):
            kept.append(response)
        if not response.final:
            return
        if len(kept) != 1:
            raise internal(f"expected a single response, got {len(kept)}")
        self._kept = None
        kept[0].final = True
        self._write(kept[0])


class GenerateResponder(Responder):
    """``generate``: one response, as JSON."""

    __slots__ = ("_count", "_decoupled", "_first", "_offloader", "layout")

    layout: Layout

    def __init__(self, exchange: HttpExchange, offloader: Offloader, *, decoupled: bool) -> None:
        super().__init__(exchange)
        self._offloader = offloader
        self._decoupled = decoupled
        self._first: InferResponse | None = None
        self._count = 0

    def _write(self, response: InferResponse) -> None:
        if not response.empty or _is_only_response(response, self._count, decoupled=self._decoupled):
            self._count += 1
            self._first = self._first or response
        if not response.final:
            return
        first = self._first
        if first is not None and first.error is not None:
            raise first.error
        if first is None or self._count > 1:
            self._exchange.respond(200, [JSON], error_body(NOT_ONE_RESPONSE))
        else:
            start_work(self._exchange, self._encode(first), cancel_on_disconnect=True)

    async def _encode(self, response: InferResponse) -> None:
        body = await self._offloader.run(_size(response), encode_generate, self.request, response, self.layout)
        self._exchange.respond(200, [JSON], body)


class TextsResponder(RequestsResponder):
    """``generate`` for several texts, with a request for each."""

    def __init__(
        self, exchange: HttpExchange, requests: Sequence[InferRequest], offloader: Offloader, *, decoupled: bool
    ) -> None:
        super().__init__(exchange, requests)
        self._offloader = offloader
        self._decoupled = decoupled
        self._responses: dict[int, InferResponse] = {}

    def _take(self, part: int, response: InferResponse) -> None:
        counts = not response.empty or _is_only_response(response, part in self._responses, decoupled=self._decoupled)
        if counts and self._responses.setdefault(part, response) is not response:
            raise invalid(NOT_ONE_RESPONSE)

    def _finish(self) -> None:
        if len(self._responses) < len(self._requests):
            raise invalid(NOT_ONE_RESPONSE)
        start_work(self._exchange, self._encode(), cancel_on_disconnect=True)

    async def _encode(self) -> None:
        responses = [self._responses[part] for part in range(len(self._requests))]
        # The requests differ only in their texts, and the first one suffices.
        body = await self._offloader.run(_size(*responses), encode_texts, self._requests[:1], responses)
        self._exchange.respond(200, [JSON], body)


class GenerateStreamResponder(Responder):
    """``generate_stream``: each response is an event; the first determines the HTTP status."""

    __slots__ = ("_decoupled", "_late", "_offloader", "layout")

    layout: Layout

    def __init__(self, exchange: HttpExchange, offloader: Offloader, *, decoupled: bool) -> None:
        super().__init__(exchange)
        self._offloader = offloader
        self._decoupled = decoupled
        #: Responses that wait behind a large one that is being encoded, which comes first.
        self._late: deque[InferResponse] = deque()

    def _write(self, response: InferResponse) -> None:
        self._late.append(response)
        if len(self._late) == 1:
            start_work(self._exchange, self._send_late())

    async def _send_late(self) -> None:
        """Send the queued responses in order; each stays in the queue until it has been sent."""
        while self._late and not self._exchange.gone:
            response = self._late[0]
            self._send(response, *await self._event(response))
            self._late.popleft()

    def _send(self, response: InferResponse, status: int, event: Buffer) -> None:
        exchange = self._exchange
        if not exchange.started and (event or response.final):
            exchange.start(status, [EVENTS])
        if event:
            exchange.write(server_sent_event(event))
        if response.final:
            exchange.finish()
        elif exchange.unsent > UNREAD_LIMIT:
            LOG.warning("the client of a stream of '%s' does not read; cancelling its request", self.request.model_name)
            exchange.abort()

    async def _event(self, response: InferResponse) -> tuple[int, Buffer]:
        """Return the HTTP status and JSON of a response; no JSON for an empty final one."""
        if response.empty and not _is_only_response(response, self._exchange.started, decoupled=self._decoupled):
            return 200, b""
        try:
            if response.error is not None:
                raise response.error
            return 200, await self._offloader.run(_size(response), encode_generate, self.request, response, self.layout)
        except ConchError as error:
            return STATUS[error.code], error_body(error.public)


def _size(*responses: InferResponse) -> int:
    """Return the size of the tensors (bytes), which decides how long writing or compressing them takes."""
    return sum([len(tensor.data) for response in responses for tensor in response.outputs])


def _is_only_response(response: InferResponse, earlier: int, *, decoupled: bool) -> bool:
    """Whether an empty response is the only one: a model that is not decoupled may have produced no outputs.

    ``earlier`` is the number of responses before this one.
    """
    return response.final and not earlier and not decoupled
