"""Handlers of the Responses API of OpenAI: creates responses, and returns and removes those that are stored."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial

import orjson

from conch.core.errors import Code
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.model_requests import EntryNeeded, RequestsResponder, Translation
from conch.frontends.http.openai import GenerationResponder, OpenAi
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import LARGE_BYTES, Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.response_store import ResponseStore
from conch.wire.openai.reading import ApiError
from conch.wire.openai.response import ResponsePlan
from conch.wire.openai.responses.items import list_items, split_entry
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
        self._owner = exchange.client
        self._response.stored &= store is not None

    def _finish(self) -> None:
        response = self._response
        if self._store is not None and response.stored:
            response.stored = self._store.put(_key(self._owner, response.id), response.entry())
        super()._finish()


class Responses:
    """The handlers; ``openai`` starts the requests."""

    def __init__(self, server: InferenceServer, openai: OpenAi, offloader: Offloader) -> None:
        self._store = server.response_store
        self._openai = openai
        self._offloader = offloader

    def create(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/responses``."""
        entries: dict[str, bytes | None] = {}

        def find_response(id: str) -> bytes:
            entry = entries[id] if id in entries else self._find(exchange, id)
            if isinstance(entry, Awaitable) or (id not in entries and entry is not None and len(entry) > LARGE_BYTES):
                raise EntryNeeded(partial(self._keep, entries, id, entry))
            return entry or b""

        arguments = find_response, self._openai.fetcher.for_request(exchange.hold)
        translation = Translation(work.responses, arguments, self._openai.requests.find_model, self._responder)
        self._openai.requests.start(exchange, translation)

    def retrieve(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``GET /v1/responses/{id}``."""
        start_work(exchange, self._retrieve(exchange, id))

    def remove(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``DELETE /v1/responses/{id}``."""
        start_work(exchange, self._remove(exchange, id))

    def input_items(self, exchange: HttpExchange, id: str) -> None:
        """Handle ``GET /v1/responses/{id}/input_items``."""
        start_work(exchange, self._input_items(exchange, id))

    def _responder(
        self, exchange: HttpExchange, model: Model, plan: ResponsePlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> RequestsResponder:
        return ResponsesResponder(exchange, model, plan, self._openai.with_defaults(model, inputs), self._store)

    def _find(self, exchange: HttpExchange, id: str) -> bytes | Awaitable[bytes | None] | None:
        return None if self._store is None else self._store.find(_key(exchange.client, id))

    @staticmethod
    async def _keep(entries: dict[str, bytes | None], id: str, entry: bytes | Awaitable[bytes | None] | None) -> int:
        """Put an entry into ``entries`` and return its size (bytes)."""
        entries[id] = entry = await entry if isinstance(entry, Awaitable) else entry
        return len(entry or b"")

    async def _stored(self, exchange: HttpExchange, id: str) -> bytes:
        """Return an entry of the store. Raises NOT_FOUND, also for the response of another client."""
        entry = self._find(exchange, id)
        if isinstance(entry, Awaitable):
            entry = await entry
        if entry is None:
            raise ApiError(f"Response with id '{id}' not found.", "id", code=Code.NOT_FOUND)
        return entry

    async def _retrieve(self, exchange: HttpExchange, id: str) -> None:
        response, _ = split_entry(await self._stored(exchange, id))
        exchange.respond(200, [JSON], response)

    async def _remove(self, exchange: HttpExchange, id: str) -> None:
        await self._stored(exchange, id)
        if self._store is not None and (removal := self._store.remove(_key(exchange.client, id))) is not None:
            await removal
        exchange.respond(200, [JSON], orjson.dumps({"id": id, "object": "response", "deleted": True}))

    async def _input_items(self, exchange: HttpExchange, id: str) -> None:
        entry = await self._stored(exchange, id)
        exchange.respond(200, [JSON], await self._offloader.run(len(entry), list_items, entry, exchange.query))


def _key(owner: str, id: str) -> str:
    """Return the key in the store of a client's response; names of clients have no slash.

    Clients without a name, as on a port without keys, have an empty one: no id of theirs is the key of another client.
    """
    return f"{owner}/{id}"
