"""The routes of the console, its static files and its log lines.

Its pages also use the routes of the KServe protocol and of the OpenAI API. ``make console`` builds the static files.

The static files need no key, because a browser sends none with the address that a user types; the page sends the key
that the user enters with all other requests. Each other route belongs to the API whose data it returns.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from operator import attrgetter
from typing import Any, Final
from urllib.parse import parse_qs

from conch.core.errors import Code, ConchError, invalid, not_found
from conch.frontends.api_keys import ApiKeys
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.console import model_pages
from conch.frontends.http.console.events import OverviewStream
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.routes import PUBLIC, HttpEndpoint
from conch.frontends.loop_budget import YieldingLister
from conch.machine.logs import LOGGER, current
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


#: The page may only load what this server serves, and no page of another origin may embed it.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    b"font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
_SECURITY: Final = (
    (b"Content-Security-Policy", POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
)
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: The names of files stay the same when their content changes, so a browser revalidates them each time.
_CACHING: Final = (b"Cache-Control", b"no-cache")
_FOLDER: Final = "assets/"
_INDEX: Final = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    type: bytes
    plain: bytes
    compressed: bytes
    tag: bytes


class StaticFiles:
    """The files of the folder ``static``, read and compressed once, at the first request."""

    def __init__(self) -> None:
        self._files: Mapping[str, _File] | None = None

    def redirect(self, exchange: HttpExchange) -> None:
        """Handle ``GET /console``; the target is relative, so that it is right behind a proxy too."""
        exchange.respond(308, [(b"Location", b"console/"), *_SECURITY])

    def serve(self, exchange: HttpExchange, path: str) -> None:
        """Handle ``GET /console/<path>``; an empty path is the page."""
        if self._files is None:
            self._files = dict(_read())
        file = self._files.get(path or _INDEX)
        if file is None:
            raise ConchError("Not Found", Code.NOT_FOUND)
        headers = [
            (b"Content-Type", file.type), _CACHING, (b"ETag", file.tag),
            (b"Vary", b"Accept-Encoding"), *_SECURITY,
        ]  # fmt: skip
        if exchange.headers.get(b"if-none-match") == file.tag:
            exchange.respond(304, headers)
        elif b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            exchange.respond(200, [*headers, (b"Content-Encoding", b"gzip")], file.compressed)
        else:
            exchange.respond(200, headers, file.plain)


def _read() -> list[tuple[str, _File]]:
    """Return the name and content of each file."""
    root = files(__package__).joinpath("static")
    entries = [(entry.name, entry) for entry in root.iterdir() if entry.is_file()]
    entries += [(_FOLDER + entry.name, entry) for entry in root.joinpath(_FOLDER).iterdir()]
    return [(name, _file(name, entry.read_bytes())) for name, entry in entries]


def _file(name: str, content: bytes) -> _File:
    kind = next((kind for suffix, kind in _TYPES.items() if name.endswith(suffix)), b"application/octet-stream")
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # with the header of gzip
    return _File(
        kind,
        content,
        compressor.compress(content) + compressor.flush(),
        b'"%b"' % sha256(content).hexdigest()[:16].encode(),
    )


#: Lines kept for each model, characters of a line, and models.
MOST_LINES: Final = 200
LONGEST_LINE: Final = 2000
MOST_MODELS: Final = 256
#: A model's name in a message of the server, as in "worker of 'NAME' died" and "loading: NAME:1".
_NAMED: Final = re.compile(r"'([^']{1,255})'|^(?:loading|unloading|successfully \w+)[ :]+'?([^':]+)")
_LEVELS: Final = {logging.DEBUG: "verbose", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}


class WorkerLogs(logging.Handler):
    """Keeps the last log lines of each model: those of its workers, and those of the server that name it.

    Uses a fixed amount of memory; any thread may log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: OrderedDict[str, deque[dict[str, Any]]] = OrderedDict()
        self._count = 0
        self._guard = threading.Lock()

    def open(self) -> None:
        """Begin to keep lines."""
        LOGGER.addHandler(self)

    def end(self) -> None:
        """Keep no further lines."""
        LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if not current().allows(record.levelno):
            return
        text = record.getMessage()
        model = getattr(record, "model", "")
        worker = bool(model)
        if not worker:
            match = _NAMED.search(text)
            if match is None:
                return
            model = match[1] or match[2]
        with self._guard:
            self._count += 1
            lines = self._lines.setdefault(model, deque(maxlen=MOST_LINES))
            self._lines.move_to_end(model)
            while len(self._lines) > MOST_MODELS:
                self._lines.popitem(last=False)
            lines.append(
                {
                    "number": self._count,
                    "time": record.created,
                    "level": _LEVELS.get(record.levelno, "error"),
                    "from": record.filename.partition("/")[0] if worker else "server",
                    "pid": record.process,
                    "text": text[:LONGEST_LINE],
                }
            )

    def lines(self, model: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the lines about a model with a number above ``after``, oldest first."""
        with self._guard:
            return [line for line in self._lines.get(model, ()) if line["number"] > after]
