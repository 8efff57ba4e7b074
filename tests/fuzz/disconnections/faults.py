"""What happens to the server meanwhile: models are reloaded and unloaded, adapters come and go, workers are killed."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.processes import workers
from tests.servers import ConchServer


def ask(server: ConchServer, path: str, body: Any = None, content_type: str = "application/json") -> tuple[int, bytes]:
    """Return the status and the body of the response to a request, a POST if there is a ``body``: bytes, or JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}{path}", data, {"content-type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Faults:
    """Causes a fault every ``seconds``, in the mean, until :meth:`stop`; ``done`` counts them."""

    def __init__(self, server: ConchServer, repository: Path, chance: random.Random, seconds: float) -> None:
        self._server = server
        self._repository = repository
        self._chance = chance
        self._seconds = seconds
        self._names = sorted(path.name for path in repository.iterdir())
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.done: Counter[str] = Counter()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._stopped.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        faults = (self._reload, self._reload, self._unload, self._load_adapter, self._load_adapter,
                  self._unload_adapter, self._kill_worker)  # fmt: skip
        while not self._stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._chance.random() * 2 * self._seconds)
            fault = self._chance.choice(faults)
            self.done[fault.__name__.strip("_")] += 1
            await asyncio.to_thread(fault)

    def _post(self, path: str, body: Any) -> None:
        with suppress(OSError):
            ask(self._server, path, body)

    def _reload(self) -> None:
        """Change the configuration of a model, so that it is not taken for the same."""
        name = self._chance.choice(self._names)
        config = self._repository / name / "config.pbtxt"
        config.write_text(f"{config.read_text() if config.exists() else ''}\n#")
        self._post(f"/v2/repository/models/{name}/load", {})

    def _unload(self) -> None:
        name = self._chance.choice(self._names)
        self._post(f"/v2/repository/models/{name}/unload", {})
        self._post(f"/v2/repository/models/{name}/load", {})

    def _load_adapter(self) -> None:
        name = self._chance.choice(("a0", "a1"))
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name, "load_inplace": True})

    def _unload_adapter(self) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": self._chance.choice(("a0", "a1"))})

    def _kill_worker(self) -> None:
        running = workers(self._server)
        if running:
            with suppress(psutil.Error):
                self._chance.choice(running).kill()
