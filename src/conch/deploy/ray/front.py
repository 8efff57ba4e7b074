"""The server of an ingress: conch's front ends over remote models that follow the replicas of the cluster.

Knows nothing of Ray.  Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from conch.app import Application
from conch.deploy.ray.remotes import ClusterModel, RemoteRepository
from conch.errors import one_line
from conch.library.flags import plan
from conch.server.remote.executor import RemoteExecutor

LOG: Final = logging.getLogger("conch")


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """What every ingress does; ``options`` are those of ``conch serve``.

    Where models share replicas (``shared``), what one takes is asked when it is asked for, as that loads it.
    """

    shared: bool = False
    drain_seconds: int = 30
    options: dict[str, Any] = field(default_factory=dict)

    def flags(self) -> dict[str, Any]:
        """The options of its server, whose models are those that replicas answer for, whatever clients load."""
        control = {
            "model_control_mode": "on-demand" if self.shared else "none",
            "repository_poll_secs": 1,
            "exit_on_error": False,  # one model that cannot be served takes none of the others away
        }
        return {"exit_timeout_secs": self.drain_seconds, **self.options, **control}


class IngressServer:
    """Listens from ``start`` on, is ready when all models are that :meth:`expect` names, and ends with ``stop``."""

    def __init__(self, work: IngressPlan) -> None:
        self._work = work
        with ExitStack() as resources:
            folder = resources.enter_context(TemporaryDirectory(prefix="conch-ingress-"))
            self._plan = plan(None, folder, work.flags(), ports=True)
            self._resources = resources.pop_all()
        self._repository = RemoteRepository(Path(folder))
        self._application: Application | None = None
        self._expected: frozenset[str] = frozenset()
        self._begun = False
        self._stopping = False
        #: Held by whoever changes the repository or the models.
        self._turn = asyncio.Lock()

    async def start(self) -> dict[str, tuple[str, int]]:
        """Listen; returns host and port of every front end.  Raises INTERNAL for a port that is taken."""
        try:
            self._application = application = Application(self._plan.settings)
            await application.listen()
        except BaseException:
            await self.stop()
            raise
        return dict(application.addresses)

    async def expect(self, names: Iterable[str]) -> None:
        """Have the models of these names, and no others, from now on."""
        assert self._application is not None
        async with self._turn:
            self._expected = frozenset(names)
            for name in self._repository.written.keys() - self._expected:
                await asyncio.to_thread(self._repository.remove, name)
                await self._application.server.unload_removed(name)

    async def follow(self, found: Mapping[str, ClusterModel]) -> None:
        """Serve what is expected of the models ``found`` in the cluster."""
        async with self._turn:
            if not self._stopping:
                await self._follow({name: model for name, model in found.items() if name in self._expected})

    async def _follow(self, models: Mapping[str, ClusterModel]) -> None:
        assert self._application is not None
        server = self._application.server
        changed = await asyncio.to_thread(self._repository.write, models)
        if not self._begun:
            if not self._expected or models.keys() != self._expected:
                return  # until then, clients are told that the server is starting
            self._begun = True
            await self._application.load_models()
        elif self._work.shared:
            for name in changed:
                if server.versions_of(name):
                    await server.unload_removed(name)  # the next request finds out what it takes
        elif changed:
            for name, error in (await server.load_anew(changed)).items():
                LOG.warning("the ingress cannot serve '%s': %s", name, one_line(error))
        for name in self._repository.written:
            urls = models[name].urls if name in models else ()
            for executor in self._executors(name):
                executor.endpoints.update(urls)

    async def stop(self) -> None:
        """Refuse new requests, finish the others, close the ports."""
        self._stopping = True
        try:
            if self._application is not None:
                await self._application.stop(self._application.exit_seconds)
        finally:
            async with self._turn:
                await asyncio.to_thread(self._resources.close)

    def _executors(self, name: str) -> list[RemoteExecutor]:
        assert self._application is not None
        versions = self._application.server.versions_of(name)
        return [model.executor for model in versions if isinstance(model.executor, RemoteExecutor)]
