"""A replica of a deployment: one ``conch.Server`` with the deployment's models, on ports of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from conch.deploy.ray.listing import ANNOUNCE_SECONDS, WITHDRAW_SECONDS, ReplicaRecord, ServedModel
from conch.deploy.ray.relay import Relay, Relaying
from conch.deploy.ray.scaling import UNDER_WAY
from conch.errors import ConchError, one_line
from conch.library.server import Server

LOG: Final = logging.getLogger("conch")


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What every replica of a deployment serves.

    ``models`` are those that it loads at its start; where ``most_loaded`` is not 0, it loads any of them when it is
    asked for, and has at most so many at a time.  ``options`` are options of ``conch serve``.
    """

    deployment: str
    version: str
    repository: tuple[str, ...]
    models: tuple[str, ...]
    loads: tuple[str, ...]
    most_loaded: int = 0
    drain_seconds: int = 30
    options: dict[str, Any] = field(default_factory=dict)

    def flags(self, address: str) -> dict[str, Any]:
        """The options of the server, which listens on free ports of ``address``."""
        control: dict[str, Any] = {"model_control_mode": "explicit", "load_model": self.loads}
        if self.most_loaded:
            control = {"model_control_mode": "on-demand", "max_loaded_models": self.most_loaded}
        listening = {"http_address": address, "grpc_address": address, "http_port": 0, "grpc_port": 0}
        return {"exit_timeout_secs": self.drain_seconds, **listening, **self.options, **control}


class ModelReplica(Relaying):
    """Serves, says so to the directory, and counts for Ray Serve what does not come through it.

    Its methods run on the event loop that Ray Serve gives it; the server has its own, in a thread.
    """

    async def __init__(self, work: ReplicaWork, directory: Any) -> None:  # type: ignore[misc]  # as Ray Serve has it
        import ray
        from ray import serve

        self._work = work
        self._directory = directory
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        self._id = serve.get_replica_context().replica_tag
        flags = work.flags(ray.util.get_node_ip_address())
        try:
            async with AsyncExitStack() as resources:
                self._server = Server(model_repository=work.repository, **flags)
                await asyncio.to_thread(self._server.start)
                resources.push_async_callback(asyncio.to_thread, self._server.close, 0)
                self._record = await asyncio.to_thread(self._describe)
                self._relay = Relay(self._server.urls["http"], self._server.urls["grpc"])
                resources.push_async_callback(self._relay.close)
                await directory.announce.remote(self._record)
                resources.pop_all()
        except ConchError as error:
            with suppress(Exception):  # whatever Ray raises: it tells of this error as well
                await directory.failed.remote(work.deployment, one_line(error))
            raise RuntimeError(str(error)) from None
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

    async def __del__(self) -> None:
        """Have nobody ask any more, answer what is under way, and end.  Ray Serve calls and awaits this."""
        if not hasattr(self, "_announcing"):
            return
        self._announcing.cancel()
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS + ANNOUNCE_SECONDS):  # it waits that long for an ingress
                await self._directory.withdraw.remote(self._id)
        except Exception as error:  # whatever Ray raises: the ingresses find out without it
            LOG.warning("the directory does not answer: %s", one_line(error))
        await asyncio.to_thread(self._server.close)
        await self._relay.close()

    async def check_health(self) -> None:
        """Raises where this replica cannot recover; a worker that died is started again by its server."""
        if not await asyncio.to_thread(self._server.live):
            raise RuntimeError("the server has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The requests that are waiting or running here, however they came."""
        return {UNDER_WAY: float(await asyncio.to_thread(self._server.under_way, self._work.models))}

    def _describe(self) -> ReplicaRecord:
        urls = self._server.urls
        models = tuple(map(ServedModel, self._work.models) if self._work.most_loaded else self._loaded())
        work = self._work
        return ReplicaRecord(
            self._id, work.deployment, work.version, time.time_ns(), self._node, urls["http"], urls["grpc"], models
        )

    def _loaded(self) -> Sequence[ServedModel]:
        found = []
        for name in self._work.models:
            versions = tuple(int(version) for version in self._server.metadata(name)["versions"])
            labels = tuple((output, tuple(names)) for output, names in self._server.labels(name).items())
            found.append(ServedModel(name, json.dumps(self._server.config(name)), versions, labels))
        return found

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_SECONDS)
            try:
                await self._directory.announce.remote(self._record)
            except Exception as error:  # whatever Ray raises; the directory starts again
                LOG.warning("the directory does not answer: %s", one_line(error))
