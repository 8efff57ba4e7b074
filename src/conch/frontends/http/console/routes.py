"""The routes of the console. Its pages also use those of the KServe protocol and of the OpenAI API.

The static files need no key, because a browser sends none with the address that a user types; the page sends the key
that the user enters with all other requests. Each other route belongs to the API whose data it returns.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final
from urllib.parse import parse_qs

from conch.core.errors import invalid, not_found
from conch.frontends.api_keys import ApiKeys
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.console import model_pages
from conch.frontends.http.console.events import OverviewStream
from conch.frontends.http.console.static_files import StaticFiles
from conch.frontends.http.console.worker_logs import WorkerLogs
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.routes import PUBLIC, HttpEndpoint
from conch.frontends.loop_budget import YieldingLister
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.states import ambiguous
from conch.wire.json.text import dumps

_NO_STORE: Final = (b"Cache-Control", b"no-store")
_MODEL: Final = r"/console/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"


class Console:
    """The console of a server: its routes, and what it records between :meth:`start` and :meth:`close`."""

    def __init__(self, server: InferenceServer, lister: YieldingLister, keys: ApiKeys) -> None:
        self._server = server
        self._stream = OverviewStream(server, lister, keys)
        self._logs = WorkerLogs()
        static, get = StaticFiles(), b"GET"
        self.endpoints = [
            HttpEndpoint(r"/console", PUBLIC, {get: static.redirect}),
            HttpEndpoint(r"/console/events", "statistics", {get: self._stream.open}),
            HttpEndpoint(_MODEL, "model-config", {get: self._page}),
            HttpEndpoint(rf"{_MODEL}/statistics", "statistics", {get: self._current}),
            HttpEndpoint(rf"{_MODEL}/log", "logging", {get: self._log}),
            HttpEndpoint(r"/console/(?P<file>[a-z0-9A-Z_./-]*)", PUBLIC, {get: static.serve}),
        ]

    def start(self) -> None:
        """Begin to record the overview and the log lines of models."""
        self._logs.open()
        self._stream.start()

    async def close(self) -> None:
        """Stop recording, and end the event streams."""
        self._logs.end()
        await self._stream.close()

    def _model(self, exchange: HttpExchange, name: str, version: int) -> Model:
        """Return a version that serves, the highest for -1; does not load a model on demand.

        If models of several repositories have the name, the query ``repository`` is the number of one of them. Raises
        NOT_FOUND, and INVALID_ARG for an ambiguous name.
        """
        models = [model for model in self._server.versions_of(name) if version in (-1, model.version)]
        if repository := parse_qs(exchange.query).get("repository", [""])[0]:
            models = [model for model in models if str(self._server.overview.repository(model.key)) == repository]
        if not models:
            raise not_found(f"model '{name}' is not loaded")
        if (count := len({model.key for model in models})) > 1:
            raise ambiguous(name, count)
        return max(models, key=attrgetter("version"))

    def _page(self, exchange: HttpExchange, name: str, version: int) -> None:
        start_work(exchange, self._respond_with_page(exchange, name, version))

    async def _respond_with_page(self, exchange: HttpExchange, name: str, version: int) -> None:
        document = await model_pages.page(self._model(exchange, name, version), self._server.overview)
        exchange.respond(200, [JSON, _NO_STORE], dumps(document))

    def _current(self, exchange: HttpExchange, name: str, version: int) -> None:
        self._server.ledger.refresh()
        document = model_pages.current(self._model(exchange, name, version))
        exchange.respond(200, [JSON, _NO_STORE], dumps(document))

    def _log(self, exchange: HttpExchange, name: str, version: int) -> None:
        after = parse_qs(exchange.query).get("after", ["0"])[0]
        if not (after.isascii() and after.isdecimal() and len(after) < 20):
            raise invalid("'after' must be the number of a line")
        exchange.respond(200, [JSON, _NO_STORE], dumps(self._logs.lines(name, int(after))))
