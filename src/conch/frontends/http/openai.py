"""Handlers of the OpenAI API: models, chat completions, completions and embeddings.

The router calls them on the event loop; a process decodes large bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from time import time
from typing import Final

from conch.core.errors import Code, ConchError, internal, not_found
from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import BackgroundTasks, take_body
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.openai_status import STATUS, refuse
from conch.frontends.http.responders import EVENTS, UNREAD_LIMIT
from conch.frontends.http.traced import begin_trace
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.telemetry.tracing.tracing import Tracing
from conch.wire.openai.embeddings import EmbeddingPlan, EmbeddingResponse, embedding_body, wanted_outputs
from conch.wire.openai.models import PROMPT, list_body, model_body, usable
from conch.wire.openai.reading import error_body
from conch.wire.openai.response import ChoiceDelta, OpenAiResponse, ResponsePlan, event, read_response

# Responders are created by the handlers and called on the event loop for every response. An exchange ends when all its
# requests have completed or the first one fails; if the client disconnects, they are cancelled.


LOG = logging.getLogger("conch")

_NO_CACHE: Final = (b"Cache-Control", b"no-cache")
#: Encodes responses.
_ENCODING: Final = BackgroundTasks(refuse)


class OpenAiResponder:
    """Sends requests and handles their responses until the exchange ends."""

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
        """Send all requests; if one is refused, cancel the others and raise the error."""
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
        """Cancel all requests and send nothing more to the client."""
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
        """Send or end the response; called when all requests have completed without error."""
        raise NotImplementedError


class GenerationResponder(OpenAiResponder):
    """Responds with a chat completion or completions, as one object or as events."""

    def __init__(
        self, exchange: HttpExchange, model: Model, plan: ResponsePlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> None:
        self._response: OpenAiResponse = plan.answer(plan.adapter or model.name)
        self._choices = plan.choices
        self._top = plan.logprobs or 0
        self._stream = plan.stream
        self._members = plan.members
        super().__init__(exchange, model, inputs, id=self._response.id)
        #: Numbers of the requests whose prompt tokens have been counted.
        self._counted: set[int] = set()

    def _take(self, part: int, response: InferResponse) -> None:
        openai_response, last = self._response, response.final
        contents = read_response(response, self._top)
        pieces = contents.pieces[: self._choices]
        if last:
            pieces += [ChoiceDelta()] * (self._choices - len(pieces))
        prompt = contents.prompt_tokens
        if prompt is not None:
            prompt = None if part in self._counted else prompt
            self._counted.add(part)
        openai_response.usage.add(prompt, pieces)
        first = part * self._choices
        parts = [(index, piece) for index, piece in enumerate(pieces, first) if not openai_response.ended(index)]
        if not self._stream:
            for index, piece in parts:
                openai_response.add(index, piece, last=last)
        else:
            self._send(b"".join([openai_response.events(index, piece, last=last) for index, piece in parts]))

    def _fail(self, error: ConchError) -> None:
        member = self._members.get(error.param or "")
        if member is not None:
            error = error.prefixed("")
            error.param = member
        super()._fail(error)

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
            self._send(self._response.closing())
            self._exchange.finish()
        else:
            self._exchange.respond(200, [JSON], self._response.body())


class EmbeddingResponder(OpenAiResponder):
    """Responds with the embeddings of all texts, as one object."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: EmbeddingPlan,
        inputs: Sequence[dict[str, WireTensor]],
        offloader: Offloader,
    ) -> None:
        super().__init__(exchange, model, inputs, outputs=wanted_outputs(model.signature))
        self._plan = plan
        self._offloader = offloader
        self._rows = [tensors[PROMPT].shape[0] if tensors[PROMPT].shape else 1 for tensors in inputs]
        self._response = EmbeddingResponse(plan, model.signature, len(inputs))

    def _take(self, part: int, response: InferResponse) -> None:
        self._response.add(part, self._rows[part], response)

    def _finish(self) -> None:
        _ENCODING.start(self._exchange, self._encode(self._response.vectors()), cancel_on_disconnect=True)

    async def _encode(self, vectors: list[memoryview]) -> None:
        body = await self._offloader.run(
            sum(map(len, vectors)), embedding_body, vectors, self._plan, self._model, self._response.tokens
        )
        self._exchange.respond(200, [JSON], body)


class OpenAi:
    """The handlers; each responds to its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._offloader = offloader
        self._limit = server.settings.http_max_input_size
        self._created = int(time())
        self._tasks = BackgroundTasks(refuse)

    def models(self, exchange: HttpExchange) -> None:
        """Handle ``GET /v1/models``: list the ready models that an endpoint can use, and their LoRA adapters."""
        names = [name for name in self._server.ready_models() if self._is_usable(name)]
        adapters = {adapter: name for adapter, name in self._server.adapters().items() if name in names}
        exchange.respond(200, [JSON], list_body(names, adapters, self._created))

    def model(self, exchange: HttpExchange, name: str) -> None:
        """Handle ``GET /v1/models/{name}``: describe one of them."""
        parent = None if self._is_usable(name) else self._server.adapters().get(name)
        if not self._is_usable(name if parent is None else parent):
            raise not_found(f"The model '{name}' does not exist")
        exchange.respond(200, [JSON], model_body(name, self._created, parent))

    def chat(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/chat/completions``."""
        self._start(exchange, "chat")

    def completion(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/completions``."""
        self._start(exchange, "completion")

    def embedding(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/embeddings``."""
        self._start(exchange, "embedding")

    def _model(self, name: str) -> Model:
        """Return the model with a name, or with a LoRA adapter of that name. Raises NOT_FOUND or UNAVAILABLE."""
        try:
            return self._server.model(name)
        except ConchError as missing:
            absent = missing.code is Code.NOT_FOUND or isinstance(missing, LoadNeeded)
            parent = self._server.adapters().get(name) if absent else None
            if parent is None:
                raise
            return self._server.model(parent)

    def _is_usable(self, name: str) -> bool:
        """Whether an endpoint can use the model; True for a model whose signature is unknown until it is loaded."""
        if not self._server.model_ready(name):
            return False
        signature = self._server.signature(name)
        return signature is None or usable(signature)

    def _start(self, exchange: HttpExchange, endpoint: str) -> None:
        self._tasks.start(exchange, self._run(exchange, endpoint), cancel_on_disconnect=True)

    async def _run(self, exchange: HttpExchange, endpoint: str) -> None:
        """Decode and start a request; if its model must be loaded first, load it and decode again.

        The model stays loaded from the moment its name has been read.
        """
        body, encoding, size = take_body(exchange, self._limit)
        while True:
            again = body if self._server.loads_on_demand else b""
            with ExitStack() as stack:
                model: Model

                def signature_of(name: str, stack: ExitStack = stack) -> ModelSignature:
                    nonlocal model, again
                    model = self._model(name)
                    stack.enter_context(model.held())
                    again = b""
                    return model.signature

                decoding = self._offloader.run(size, work.openai, body, endpoint, encoding, self._limit, signature_of)
                body = b""
                try:
                    plan, inputs = await decoding
                except LoadNeeded as needed:
                    await needed.wait()
                else:
                    self._responder(exchange, model, plan, inputs).start(model, self._server.tracing)
                    return
            body = again

    def _responder(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: ResponsePlan | EmbeddingPlan,
        inputs: Sequence[dict[str, WireTensor]],
    ) -> OpenAiResponder:
        if isinstance(plan, EmbeddingPlan):
            return EmbeddingResponder(exchange, model, plan, inputs, self._offloader)
        return GenerationResponder(exchange, model, plan, inputs)
