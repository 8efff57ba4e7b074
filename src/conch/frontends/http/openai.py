"""The OpenAI API: the handlers of models, chats, completions and embeddings.

Runs on the event loop, but for large bodies, which are read in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import time

from conch.errors import Code, ConchError, internal
from conch.frontends.http.exchange import Exchange
from conch.frontends.http.inference import LARGE_JSON
from conch.frontends.http.openai_delivery import Delivery, EmbeddingDelivery, GenerationDelivery
from conch.frontends.http.openai_status import refuse
from conch.frontends.http.status import JSON
from conch.server.core import Server
from conch.server.model import Model
from conch.wire import compression
from conch.wire.openai.chat import read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.embeddings import read_embedding
from conch.wire.openai.errors import ApiError
from conch.wire.openai.models import list_body, model_body, require_chat, require_completion, require_embedding, usable
from conch.wire.openai.reading import Fields, read_body

LOG = logging.getLogger("conch")

#: From a model and what a request's body still holds to what answers it.
Prepare = Callable[[Exchange, Model, Fields], Delivery]


class OpenAi:
    """The handlers; each answers its exchange or raises :class:`ConchError`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit = server.settings.http_max_input_size
        self._created = int(time())
        self._tasks: set[asyncio.Task[None]] = set()

    def models(self, exchange: Exchange) -> None:
        """``GET /v1/models``: the ready models that one of the endpoints takes."""
        names = dict.fromkeys(entry["name"] for entry in self._server.index(ready_only=True))
        exchange.respond(200, [JSON], list_body(filter(self._is_usable, names), self._created))

    def model(self, exchange: Exchange, name: str) -> None:
        """``GET /v1/models/{name}``."""
        if not self._is_usable(name):
            raise _unknown(f"The model '{name}' does not exist")
        exchange.respond(200, [JSON], model_body(name, self._created))

    def chat(self, exchange: Exchange) -> None:
        """``POST /v1/chat/completions``."""
        self._start(exchange, _chat)

    def completion(self, exchange: Exchange) -> None:
        """``POST /v1/completions``."""
        self._start(exchange, _completion)

    def embedding(self, exchange: Exchange) -> None:
        """``POST /v1/embeddings``."""
        self._start(exchange, _embedding)

    def _is_usable(self, name: str) -> bool:
        return self._server.model_ready(name) and usable(self._server.model(name).signature)

    def _start(self, exchange: Exchange, prepare: Prepare) -> None:
        if len(exchange.body) > LARGE_JSON:
            task = asyncio.get_running_loop().create_task(self._start_large(exchange, prepare))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        fields = self._read(exchange)
        model = self._model(fields)
        prepare(exchange, model, fields).start(model)

    async def _start_large(self, exchange: Exchange, prepare: Prepare) -> None:
        """Read in a thread, so that others are served meanwhile."""
        try:
            fields = await asyncio.to_thread(self._read, exchange)
            model = self._model(fields)
            delivery = await asyncio.to_thread(prepare, exchange, model, fields)
            if exchange.gone:
                return
            if model.stopping and not self._server.exiting:  # it was reloaded meanwhile
                model = self._server.model(model.name)
            delivery.start(model)
        except ConchError as error:
            refuse(exchange, error)
        except Exception as error:
            LOG.exception("a request to %s failed", exchange.path.decode("latin-1"))
            refuse(exchange, internal(f"{type(error).__name__}: {error}"))

    def _read(self, exchange: Exchange) -> Fields:
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


def _chat(exchange: Exchange, model: Model, fields: Fields) -> Delivery:
    require_chat(model.signature)
    return GenerationDelivery(exchange, model, read_chat(fields))


def _completion(exchange: Exchange, model: Model, fields: Fields) -> Delivery:
    require_completion(model.signature)
    return GenerationDelivery(exchange, model, read_completion(fields))


def _embedding(exchange: Exchange, model: Model, fields: Fields) -> Delivery:
    require_embedding(model.signature)
    return EmbeddingDelivery(exchange, model, read_embedding(fields))


def _unknown(message: str) -> ApiError:
    return ApiError(message, "model", code=Code.NOT_FOUND, reason="model_not_found")
