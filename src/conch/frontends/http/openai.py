"""The OpenAI API: the handlers of models, chats, completions and embeddings.

Called by the router; runs on the event loop, but for large bodies, which are read in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time

from conch.errors import Code, ConchError
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.openai_responders import EmbeddingResponder, GenerationResponder, OpenAiResponder
from conch.frontends.http.openai_status import refuse
from conch.frontends.http.tasks import ExchangeTasks, is_large
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.wire import compression
from conch.wire.openai.chat import read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.embeddings import read_embedding
from conch.wire.openai.errors import ApiError
from conch.wire.openai.models import list_body, model_body, require_chat, require_completion, require_embedding, usable
from conch.wire.openai.reading import Fields, read_body

#: From a model and the fields of a request to its responder, which sends it and answers the exchange.
Prepare = Callable[[HttpExchange, Model, Fields], OpenAiResponder]


class OpenAi:
    """The handlers; each answers its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._limit = server.settings.http_max_input_size
        self._created = int(time())
        self._tasks = ExchangeTasks(refuse)

    def models(self, exchange: HttpExchange) -> None:
        """``GET /v1/models``: lists the ready models that one of the endpoints can use."""
        names = self._server.ready_models()
        exchange.respond(200, [JSON], list_body(filter(self._is_usable, names), self._created))

    def model(self, exchange: HttpExchange, name: str) -> None:
        """``GET /v1/models/{name}``: describes one of them."""
        if not self._is_usable(name):
            raise _unknown(f"The model '{name}' does not exist")
        exchange.respond(200, [JSON], model_body(name, self._created))

    def chat(self, exchange: HttpExchange) -> None:
        """``POST /v1/chat/completions``."""
        self._start(exchange, _chat)

    def completion(self, exchange: HttpExchange) -> None:
        """``POST /v1/completions``."""
        self._start(exchange, _completion)

    def embedding(self, exchange: HttpExchange) -> None:
        """``POST /v1/embeddings``."""
        self._start(exchange, _embedding)

    def _is_usable(self, name: str) -> bool:
        return self._server.model_ready(name) and usable(self._server.model(name).signature)

    def _start(self, exchange: HttpExchange, prepare: Prepare) -> None:
        if is_large(exchange):
            self._tasks.start(exchange, self._start_large(exchange, prepare))
            return
        fields = self._read(exchange)
        model = self._model(fields)
        prepare(exchange, model, fields).start(model)

    async def _start_large(self, exchange: HttpExchange, prepare: Prepare) -> None:
        """Read a request in threads; its model stays loaded meanwhile."""
        fields = await asyncio.to_thread(self._read, exchange)
        model = self._model(fields)
        with model.held():
            responder = await asyncio.to_thread(prepare, exchange, model, fields)
            if not exchange.gone:
                responder.start(model)

    def _read(self, exchange: HttpExchange) -> Fields:
        body = exchange.body
        encoding = exchange.headers.get(b"content-encoding")
        if encoding is not None:
            body = compression.decompress(body, encoding.decode("latin-1"), self._limit)
        return read_body(body)

    def _model(self, fields: Fields) -> Model:
        name = fields.required_text("model")
        try:
            return self._server.model(name)
        except ConchError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            raise _unknown(error.message) from None


def _chat(exchange: HttpExchange, model: Model, fields: Fields) -> OpenAiResponder:
    require_chat(model.signature)
    return GenerationResponder(exchange, model, read_chat(fields))


def _completion(exchange: HttpExchange, model: Model, fields: Fields) -> OpenAiResponder:
    require_completion(model.signature)
    return GenerationResponder(exchange, model, read_completion(fields))


def _embedding(exchange: HttpExchange, model: Model, fields: Fields) -> OpenAiResponder:
    require_embedding(model.signature)
    return EmbeddingResponder(exchange, model, read_embedding(fields))


def _unknown(message: str) -> ApiError:
    return ApiError(message, "model", code=Code.NOT_FOUND, reason="model_not_found")
