"""Handlers of the OpenAI API: models, chat completions and completions.

The router calls them on the event loop; a process decodes large bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import time

import orjson

from conch import __version__
from conch.core.errors import ConchError, not_found
from conch.core.inference import InferRequest, InferResponse, ignore
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import respond_after, start_work
from conch.frontends.http.dialects import OPENAI
from conch.frontends.http.exchange import JSON, PLAIN, HttpExchange
from conch.frontends.http.media_fetching import MediaFetcher
from conch.frontends.http.model_requests import ModelRequests, RequestsResponder, Translation
from conch.frontends.http.responders import send_events
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.wire.openai.inputs import default_temperature
from conch.wire.openai.models import list_body, model_body
from conch.wire.openai.reading import read_body
from conch.wire.openai.response import ChoiceDelta, ResponsePlan, read_response
from conch.wire.retrieval.models import kinds

LOG = logging.getLogger("conch")


class GenerationResponder(RequestsResponder):
    """Responds with a chat completion or completions, as one object or as events."""

    def __init__(
        self, exchange: HttpExchange, model: Model, plan: ResponsePlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> None:
        plan = replace(plan, output_format=model.signature.output_format)
        self._response = plan.answer(plan.adapter or model.name)
        self._choices = plan.choices
        self._top = plan.logprobs or 0
        self._stream = plan.stream
        self._members = plan.members
        id, priority = self._response.id, plan.priority
        super().__init__(
            exchange, [InferRequest(model.name, tensors, ignore, id=id, priority=priority) for tensors in inputs]
        )
        #: Numbers of the requests whose prompt tokens have been counted.
        self._counted: set[int] = set()

    def _take(self, part: int, response: InferResponse) -> None:
        generation, last = self._response, response.final
        contents = read_response(response, self._top)
        pieces = contents.pieces[: self._choices]
        if last:
            pieces += [ChoiceDelta()] * (self._choices - len(pieces))
        prompt, cached = contents.prompt_tokens, contents.cached_tokens
        if prompt is not None:
            prompt, cached = (None, None) if part in self._counted else (prompt, cached)
            self._counted.add(part)
        generation.usage.add(prompt, pieces, cached)
        first = part * self._choices
        parts = [(index, piece) for index, piece in enumerate(pieces, first) if not generation.ended(index)]
        if not self._stream:
            for index, piece in parts:
                generation.add(index, piece, last=last)
        else:
            events = b"".join([generation.events(index, piece, last=last) for index, piece in parts])
            send_events(self._exchange, events, self._model)

    def _fail(self, error: ConchError) -> None:
        member = self._members.get(error.param or "")
        if member is not None:
            error = error.prefixed("")
            error.param = member
        if self._exchange.started:
            self.cancel()
            self._exchange.write(self._response.failure((self._exchange.dialect or OPENAI).status(error), error))
            self._exchange.finish()
        else:
            super()._fail(error)

    def _finish(self) -> None:
        if self._stream:
            send_events(self._exchange, self._response.closing(), self._model)
            self._exchange.finish()
        else:
            self._exchange.respond(200, [JSON], self._response.body())


class OpenAi:
    """The handlers; each responds to its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._created = int(time())
        self.requests = ModelRequests(server, offloader)
        self.fetcher = MediaFetcher(server.settings.allowed_media_domains)

    def models(self, exchange: HttpExchange) -> None:
        """Handle ``GET /v1/models``: list the ready models that an endpoint can use, and their LoRA adapters."""
        names = [name for name in self._server.signatures() if self._is_usable(name)]
        adapters = {adapter: name for adapter, name in self._server.adapters().items() if name in names}
        exchange.respond(200, [JSON], list_body({name: self._context(name) for name in names}, adapters, self._created))

    def model(self, exchange: HttpExchange, name: str) -> None:
        """Handle ``GET /v1/models/{name}``: describe one of them."""
        parent = None if self._is_usable(name) else self._server.adapter_model(name)
        if not self._is_usable(name if parent is None else parent):
            raise not_found(f"The model '{name}' does not exist")
        exchange.respond(200, [JSON], model_body(name, self._created, self._context(parent or name), parent))

    def load_adapter(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/load_lora_adapter`` of vLLM; ``base_model_name`` chooses one of several models."""
        fields = read_body(exchange.body)
        name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
        model, in_place = fields.text("base_model_name") or "", fields.flag("load_inplace")
        fields.finish()
        loading = self._server.load_adapter(name, path, model, in_place=in_place)
        done = f"Success: LoRA adapter '{name}' added successfully."
        start_work(exchange, respond_after(exchange, loading, PLAIN, done.encode()))

    def unload_adapter(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/unload_lora_adapter`` of vLLM."""
        fields = read_body(exchange.body)
        fields.ignore("lora_int_id")
        name, model = fields.required_text("lora_name"), fields.text("base_model_name") or ""
        fields.finish()
        unloading = self._server.unload_adapter(name, model)
        done = f"Success: LoRA adapter '{name}' removed successfully."
        start_work(exchange, respond_after(exchange, unloading, PLAIN, done.encode()))

    def version(self, exchange: HttpExchange) -> None:
        """Handle ``GET /version``, as vLLM does."""
        exchange.respond(200, [JSON], orjson.dumps({"version": __version__}))

    def handler(self, endpoint: str) -> Callable[[HttpExchange], None]:
        """Return the handler of one of the endpoints that generate text (:data:`conch.wire.endpoints.ENDPOINTS`)."""
        return partial(self._start, endpoint)

    def _context(self, name: str) -> int:
        """Return the maximum length of a model's texts (tokens), 0 if it is unknown."""
        lengths = [model.statistics.runtime_facts.get("max_length", "") for model in self._server.versions_of(name)]
        return int(lengths[-1]) if lengths and lengths[-1].isdecimal() else 0

    def _is_usable(self, name: str) -> bool:
        """Whether an endpoint can use the model; True for a model whose signature is unknown until it is loaded."""
        if not self._server.model_ready(name):
            return False
        signature = self._server.signature(name)
        return signature is None or bool(kinds(signature))

    def _start(self, endpoint: str, exchange: HttpExchange) -> None:
        self.requests.start(
            exchange,
            Translation(
                work.openai,
                (endpoint, self.fetcher.for_request(exchange.hold)),
                self.requests.find_model,
                self._responder,
            ),
        )

    def _responder(
        self, exchange: HttpExchange, model: Model, plan: ResponsePlan, inputs: Sequence[dict[str, WireTensor]]
    ) -> RequestsResponder:
        return GenerationResponder(exchange, model, plan, self.with_defaults(model, inputs))

    def with_defaults(self, model: Model, inputs: Sequence[dict[str, WireTensor]]) -> list[dict[str, WireTensor]]:
        """Return the inputs of requests, with this server's default temperature for a model that takes it."""
        temperature = default_temperature(model.signature, self._server.settings.default_temperature)
        return [{**tensors, **temperature} for tensors in inputs]
