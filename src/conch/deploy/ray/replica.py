"""A replica of a deployment: one ``conch.Server`` with the deployment's models, on its own ports."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from conch.core.errors import ConchError, one_line
from conch.deploy.ray.registry import DEREGISTER_SECONDS, REGISTER_SECONDS, ReplicaRecord, ServedModel
from conch.deploy.ray.scaling import IN_FLIGHT
from conch.library.server import Server

LOG: Final = logging.getLogger("conch")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The configuration of a deployment's replicas.

    The server loads ``loads`` at startup. If ``max_loaded_models`` is not 0, it loads any of ``models`` on demand
    instead, at most that many at a time. ``options`` are options of ``conch serve``.
    """

    deployment: str
    version: str
    repository: tuple[str, ...]
    models: tuple[str, ...]
    loads: tuple[str, ...]
    max_loaded_models: int = 0
    drain_seconds: int = 30
    options: dict[str, Any] = field(default_factory=dict)

    def flags(self, address: str) -> dict[str, Any]:
        """Return the options of the server, which listens on free ports of ``address``."""
        control: dict[str, Any] = {"model_control_mode": "explicit", "load_model": self.loads}
        if self.max_loaded_models:
            control = {"model_control_mode": "on-demand", "max_loaded_models": self.max_loaded_models}
        listening = {"http_address": address, "grpc_address": address, "http_port": 0, "grpc_port": 0}
        return {"exit_timeout_secs": self.drain_seconds, **listening, **self.options, **control}


class ModelReplica:
    """Serves, renews its registration, and reports in-flight requests to Ray Serve, which does not see them.

    Its methods run on Ray Serve's event loop; the server has its own, in a thread.
    """

    async def __init__(self, spec: ReplicaSpec, registry: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        import ray
        from ray import serve

        self._spec = spec
        self._registry = registry
        self._node = ray.get_runtime_context().get_node_id()
        self._id = serve.get_replica_context().replica_tag
        flags = spec.flags(ray.util.get_node_ip_address())
        try:
            async with AsyncExitStack() as resources:
                self._server = Server(model_repository=spec.repository, **flags)
                await asyncio.to_thread(self._server.start)
                resources.push_async_callback(asyncio.to_thread, self._server.close, 0)
                self._record = await asyncio.to_thread(self._describe)
                await registry.register.remote(self._record)
                resources.pop_all()
        except ConchError as error:
            with suppress(Exception):  # any exception of Ray, which also reports this error
                await registry.failed.remote(spec.deployment, one_line(error))
            raise RuntimeError(str(error)) from None
        self._registering = asyncio.get_running_loop().create_task(self._register())

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that deregisters and completes the in-flight requests; None if there is nothing to end.

        Ray Serve calls this and awaits the coroutine. Python calls it again when the object is freed.
        """
        registering = self.__dict__.pop("_registering", None)
        return self._end(registering) if registering is not None else None

    async def _end(self, registering: asyncio.Task[None]) -> None:
        registering.cancel()
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS + REGISTER_SECONDS):  # the registry waits for ingresses
                await self._registry.deregister.remote(self._id)
        except Exception as error:  # any exception of Ray; the ingresses detect the end without it
            LOG.warning("the replica registry does not respond: %s", one_line(error))
        await asyncio.to_thread(self._server.close)

    async def check_health(self) -> None:
        """Raise if this replica cannot recover; its server restarts dead workers."""
        if not await asyncio.to_thread(self._server.live):
            raise RuntimeError("the server has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of queued and running requests."""
        return {IN_FLIGHT: float(await asyncio.to_thread(self._server.in_flight, self._spec.models))}

    def _describe(self) -> ReplicaRecord:
        spec, urls = self._spec, self._server.urls
        models = tuple(map(ServedModel, spec.models) if spec.max_loaded_models else self._loaded())
        return ReplicaRecord(
            self._id, spec.deployment, spec.version, time.time_ns(), self._node, urls["http"], urls["grpc"], models
        )

    def _loaded(self) -> Sequence[ServedModel]:
        models = []
        for name in self._spec.models:
            versions = tuple(int(version) for version in self._server.metadata(name)["versions"])
            labels = tuple((output, tuple(names)) for output, names in self._server.labels(name).items())
            models.append(ServedModel(name, json.dumps(self._server.config(name)), versions, labels))
        return models

    async def _register(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_SECONDS)
            try:
                await self._registry.register.remote(self._record)
            except Exception as error:  # any exception of Ray; the registry is restarted
                LOG.warning("the replica registry does not respond: %s", one_line(error))
