"""From one request to the OpenAI API to requests to a model, and from their responses to the answer.

Made by the handlers (``openai.py``); called for every response, on the event loop.  The exchange is answered when all
requests have ended, or when the first of them fails; a client that hangs up cancels them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from conch.errors import ConchError, internal
from conch.frontends.codec import answers as large
from conch.frontends.codec.pool import LARGE, Codec
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.openai_status import STATUS, refuse
from conch.frontends.http.responders import EVENTS, UNREAD_LIMIT
from conch.frontends.http.tasks import ExchangeTasks, given_up_by_client
from conch.frontends.http.traced import begin_trace
from conch.inference import InferRequest, InferResponse
from conch.server.model import Model
from conch.telemetry.tracing.tracing import Tracing
from conch.tensors import WireTensor
from conch.wire.openai.answering import Answer, AnswerPlan, event
from conch.wire.openai.embeddings import EmbeddingAnswer, EmbeddingPlan, wanted_outputs
from conch.wire.openai.errors import error_body
from conch.wire.openai.models import PROMPT
from conch.wire.openai.responses import ChoiceDelta, read_response

LOG = logging.getLogger("conch")

_NO_CACHE: Final = (b"Cache-Control", b"no-cache")
#: Answers that are so large that the codec encodes them.
_ENCODING: Final = ExchangeTasks(refuse)


class OpenAiResponder:
    """Sends the requests and handles their responses, until the exchange is answered."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        inputs: Sequence[dict[str, WireTensor]],
        *,
        id: str = "",
        outputs: tuple[str, ...] = (),
    ) -> None:
        self._exchange = exchange
        self._model = model.name
        self._requests = [
            InferRequest(model.name, tensors, partial(self._on_response, part), id=id, outputs=outputs)
            for part, tensors in enumerate(inputs)
        ]
        self._running = len(self._requests)
        self._ended = False

    def start(self, model: Model, tracing: Tracing) -> None:
        """Send all requests; if one is refused, cancels the others and raises the error."""
        try:
            for request in self._requests:
                if self._ended:
                    return
                if tracing.on:
                    begin_trace(tracing, self._exchange, request)
                model.infer(request)
        except BaseException:
            self.cancel()
            raise
        if not self._ended:
            self._exchange.on_disconnect = self.cancel

    def cancel(self) -> None:
        """Cancel all requests; nothing is sent to the client any more."""
        self._ended = True
        for request in self._requests:
            request.cancel()

    def _on_response(self, part: int, response: InferResponse) -> None:
        if self._ended:
            return
        try:
            if response.error is not None:
                raise response.error
            self._take(part, response)
            if response.final:
                self._running -= 1
                if not self._running:
                    self._ended = True
                    self._finish()
        except ConchError as error:
            self._fail(error)
        except Exception:
            LOG.exception("a response of '%s' could not be written", self._model)
            self._fail(internal("the response could not be written"))

    def _fail(self, error: ConchError) -> None:
        self.cancel()
        exchange = self._exchange
        if exchange.started:
            exchange.write(event(error_body(STATUS[error.code], error)))
            exchange.finish()
        else:
            refuse(exchange, error)

    def _take(self, part: int, response: InferResponse) -> None:
        """Write or keep a response to request number ``part``; ``ConchError`` fails the exchange."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Answer, or end the answer: all requests have ended without an error."""
        raise NotImplementedError


class GenerationResponder(OpenAiResponder):
    """Answers with a chat completion or completions, as one object or as events."""

    def __init__(
        self, exchange: HttpExchange, model: Model, plan: AnswerPlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> None:
        self._answer: Answer = plan.answer(model.name)
        self._choices = plan.choices
        self._top = plan.logprobs or 0
        self._stream = plan.stream
        super().__init__(exchange, model, inputs, id=self._answer.id)
        #: Requests, by number, whose prompts have been counted.
        self._counted: set[int] = set()

    def _take(self, part: int, response: InferResponse) -> None:
        answer, last = self._answer, response.final
        contents = read_response(response, self._top)
        pieces = contents.pieces[: self._choices]
        if last:
            pieces += [ChoiceDelta()] * (self._choices - len(pieces))
        prompt = contents.prompt_tokens
        if prompt is not None:
            prompt = None if part in self._counted else prompt
            self._counted.add(part)
        answer.usage.add(prompt, pieces)
        first = part * self._choices
        parts = [(index, piece) for index, piece in enumerate(pieces, first) if not answer.ended(index)]
        if not self._stream:
            for index, piece in parts:
                answer.add(index, piece, last=last)
        else:
            self._send(b"".join([answer.events(index, piece, last=last) for index, piece in parts]))

    def _send(self, events: bytes) -> None:
        exchange = self._exchange
        if not events:
            return
        if not exchange.started:
            exchange.start(200, [EVENTS, _NO_CACHE])
        exchange.write(events)
        if exchange.unsent > UNREAD_LIMIT:
            LOG.warning("the client of a stream of '%s' does not read; giving its request up", self._model)
            exchange.abort()

    def _finish(self) -> None:
        if self._stream:
            self._send(self._answer.closing())
            self._exchange.finish()
        else:
            self._exchange.respond(200, [JSON], self._answer.body())


class EmbeddingResponder(OpenAiResponder):
    """Answers with the embeddings of all texts, as one object."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: EmbeddingPlan,
        inputs: Sequence[dict[str, WireTensor]],
        codec: Codec,
    ) -> None:
        super().__init__(exchange, model, inputs, outputs=wanted_outputs(model.signature))
        self._plan = plan
        self._codec = codec
        self._rows = [tensors[PROMPT].shape[0] if tensors[PROMPT].shape else 1 for tensors in inputs]
        self._answer = EmbeddingAnswer(plan, model.name, model.signature, len(inputs))

    def _take(self, part: int, response: InferResponse) -> None:
        self._answer.add(part, self._rows[part], response)

    def _finish(self) -> None:
        vectors = self._answer.vectors()
        if sum(map(len, vectors)) > LARGE:
            _ENCODING.start(self._exchange, self._have_encoded(vectors))
        else:
            self._exchange.respond(200, [JSON], self._answer.body())

    async def _have_encoded(self, vectors: list[memoryview]) -> None:
        with given_up_by_client(self._exchange):
            body = await large.encode_embeddings(self._codec, vectors, self._plan, self._model, self._answer.tokens)
        self._exchange.respond(200, [JSON], *body)
