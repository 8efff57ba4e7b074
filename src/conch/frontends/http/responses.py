"""Handlers of the Responses API of OpenAI: creates responses, and returns and removes those that are stored."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import orjson

from conch.core.errors import Code
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import BackgroundTasks
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.model_requests import EntryNeeded, RequestsResponder, Translation
from conch.frontends.http.openai import GenerationResponder, OpenAi
from conch.frontends.offloading import work
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.response_store import ResponseStore
from conch.wire.openai.reading import ApiError
from conch.wire.openai.response import ResponsePlan
from conch.wire.openai.responses.items import list_items
from conch.wire.openai.responses.response import ResponsesResponse


class ResponsesResponder(GenerationResponder):
    """Responds with a response, and stores it when it has ended."""

    _response: ResponsesResponse

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: ResponsePlan,
        inputs: Sequence[dict[str, WireTensor]],
        store: ResponseStore | None,
    ) -> None:
        super().__init__(exchange, model, plan, inputs)
        self._store = store

    def _finish(self) -> None:
        if self._store is not None and (entry := self._response.stored) is not None:
            self._store.put(self._response.id, entry)
        super()._finish()


class Responses:
    """The handlers; ``openai`` starts the requests."""

    def __init__(self, server: InferenceServer, openai: OpenAi) -> None:
        self._store = server.response_store
        self._openai = openai
        self._tasks = BackgroundTasks(refuse)

    def create(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/responses``."""
        entries: dict[str, bytes | None] = {}

        def find_response(id: str) -> bytes:
            entry = entries[id] if id in entries else self._find(id)
            if isinstance(entry, Awaitable):
                raise EntryNeeded(self._keep(entries, id, entry))
            if entry is None:
                message = f"Previous response with id '{id}' not found."
                raise ApiError(message, "previous_response_id", reason="previous_response_not_found")
            return entry

        translation = Translation(work.responses, (find_response,), self._openai.requests.find_model, self._responder)
        self._openai.requests.start(exchange, translation)

    def retrieve(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``GET /v1/responses/{id}``."""
        self._tasks.start(exchange, self._retrieve(exchange, id))

    def remove(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``DELETE /v1/responses/{id}``."""
        self._tasks.start(exchange, self._remove(exchange, id))

    def input_items(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``GET /v1/responses/{id}/input_items``."""
        self._tasks.start(exchange, self._input_items(exchange, id))

    def _responder(
        self, exchange: HttpExchange, model: Model, plan: ResponsePlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> RequestsResponder:
        return ResponsesResponder(exchange, model, plan, inputs, self._store)

    def _find(self, id: str) -> bytes | Awaitable[bytes | None] | None:
        return None if self._store is None else self._store.find(id)

    @staticmethod
    async def _keep(entries: dict[str, bytes | None], id: str, entry: Awaitable[bytes | None]) -> None:
        entries[id] = await entry

    async def _stored(self, id: str) -> dict[str, Any]:
        """Return an entry of the store. Raises NOT_FOUND."""
        entry = self._find(id)
        if isinstance(entry, Awaitable):
            entry = await entry
        if entry is None:
            raise ApiError(f"Response with id '{id}' not found.", "id", code=Code.NOT_FOUND)
        stored: dict[str, Any] = orjson.loads(entry)
        return stored

    async def _retrieve(self, exchange: HttpExchange, id: str) -> None:
        stored = await self._stored(id)
        exchange.respond(200, [JSON], orjson.dumps(stored["response"]))

    async def _remove(self, exchange: HttpExchange, id: str) -> None:
        await self._stored(id)
        if self._store is not None and (removal := self._store.remove(id)) is not None:
            await removal
        exchange.respond(200, [JSON], orjson.dumps({"id": id, "object": "response", "deleted": True}))

    async def _input_items(self, exchange: HttpExchange, id: str) -> None:
        stored = await self._stored(id)
        exchange.respond(200, [JSON], list_items(stored["items"]))
