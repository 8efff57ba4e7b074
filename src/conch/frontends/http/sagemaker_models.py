"""Loads, lists and unloads models for SageMaker's multi-model endpoints; the platform downloads them.

The platform's router calls the handlers, on the event loop. Source: SageMaker's contract for multi-model containers.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

from conch.core.errors import Code, ConchError, invalid
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.platforms import not_loaded
from conch.frontends.http.routes import HttpEndpoint
from conch.repository.model_files import CONFIG_FILE
from conch.server.core import InferenceServer
from conch.wire.json import control as wire
from conch.wire.json.text import dumps

#: The directory of the platform's models; requests cannot load from any other path.
MODELS: Final = Path("/opt/ml/models")
_URL: Final = re.compile(r"[0-9A-Za-z._-]+/model(?:/[0-9A-Za-z._-]+)?/?")


class SageMakerModels:
    """The handlers of ``/models``; ``endpoints`` are their routes. Models are served under the platform's names."""

    def __init__(self, server: InferenceServer, models: Path = MODELS) -> None:
        self._server = server
        self._models = models

    @property
    def endpoints(self) -> list[HttpEndpoint]:
        api = "model-repository"
        return [
            HttpEndpoint(r"/models/?", api, {b"GET": self.list, b"POST": self.load}),
            HttpEndpoint(r"/models/(?P<target>[^/]+)", api, {b"GET": self.show, b"DELETE": self.unload}),
        ]

    def list(self, exchange: HttpExchange) -> None:
        shown = [_shown(name, path) for name, path in sorted(self._server.repository.registered.items())]
        exchange.respond(200, [JSON], dumps({"models": shown}))

    def show(self, exchange: HttpExchange, name: str) -> None:
        path = self._server.repository.registered.get(name)
        if path is None:
            raise not_loaded(name)
        exchange.respond(200, [JSON], dumps(_shown(name, path)))

    def load(self, exchange: HttpExchange) -> None:
        name, url = wire.read_sagemaker_model(exchange.body)
        path = Path(url)
        beyond = url.removeprefix(f"{self._models}/")
        if beyond == url or ".." in path.parts or not _URL.fullmatch(beyond):
            raise invalid(f"'{url}' is not a model of SageMaker's: expected {self._models}/<identifier>/model")
        self._server.require_explicit_control()
        if name in self._server.repository.registered:
            message = f"model repository '{path}' has already been registered"
            exchange.respond(409, [JSON], wire.error_body(message))
        else:
            start_work(exchange, self._load(exchange, name, path))

    def unload(self, exchange: HttpExchange, name: str) -> None:
        if name not in self._server.repository.registered:
            raise not_loaded(name)
        start_work(exchange, self._unload(exchange, name))

    async def _load(self, exchange: HttpExchange, name: str, path: Path) -> None:
        directory = await asyncio.to_thread(_model_in, path)
        if directory is None:
            raise invalid(f"failed to register '{path}', repository not found")
        directories = self._server.repository.registered
        directories[name] = directory
        try:
            await self._server.load(name)
        except BaseException as error:
            directories.pop(name, None)
            if isinstance(error, ConchError) and error.code is Code.UNAVAILABLE:
                # This status tells the platform to unload other models first.
                exchange.respond(507, [JSON], wire.error_body(error.public))
                return
            raise
        exchange.respond(200, [JSON])

    async def _unload(self, exchange: HttpExchange, name: str) -> None:
        await self._server.unload(name, dependents=True)
        self._server.repository.registered.pop(name, None)
        exchange.respond(200, [JSON])


def _model_in(path: Path) -> Path | None:
    """Return the model directory at ``path``: ``path`` itself, or its only subdirectory if that is the packed model."""
    try:
        directories = [entry for entry in path.iterdir() if entry.is_dir()]
        packed = len(directories) == 1 and not directories[0].name.isdigit() and not (path / CONFIG_FILE).exists()
    except OSError:
        return None
    return directories[0] if packed else path


def _shown(name: str, path: Path) -> dict[str, str]:
    return {"modelName": name, "modelUrl": str(path)}
