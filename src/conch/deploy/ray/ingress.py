"""The ingress of a node, as Ray Serve runs it: it learns from the directory which replicas there are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from conch.addresses import host_and_port
from conch.deploy.ray.directory import WATCH_SECONDS
from conch.deploy.ray.front import IngressPlan, IngressServer
from conch.deploy.ray.listing import IngressRecord, KnownReplicas, ReplicaRecord
from conch.deploy.ray.relay import Relay, Relaying
from conch.deploy.ray.remotes import ClusterModel, cluster_models
from conch.errors import ConchError, one_line
from conch.library.loop_thread import LoopThread

LOG: Final = logging.getLogger("conch")

#: What the directory calls the ingresses where it says what could not start.
INGRESS: Final = "ingress"
#: How long to wait before the directory is asked again that did not answer (s).
_RETRY_SECONDS: Final = 1.0
#: How long the directory may take to answer, also where there is no news (s).
_ANSWER_SECONDS: Final = 4 * WATCH_SECONDS


class NodeIngress(Relaying):
    """One ingress.  Its methods run on the event loop that Ray Serve gives it; its server has its own, in a thread."""

    async def __init__(self, work: IngressPlan, directory: Any) -> None:  # type: ignore[misc]  # as Ray Serve has it
        import ray
        from ray import serve

        self._directory = directory
        self._id = serve.get_replica_context().replica_tag
        self._known = KnownReplicas()
        #: What ``_models`` was made of: the directory answers every few seconds, mostly with nothing new.
        self._replicas: list[ReplicaRecord] = []
        self._models: Mapping[str, ClusterModel] = {}
        self._following = asyncio.Lock()
        try:
            async with AsyncExitStack() as resources:
                self._thread = LoopThread()
                resources.push_async_callback(asyncio.to_thread, self._thread.close)
                self._server = IngressServer(work)
                addresses = await asyncio.to_thread(self._thread.run, self._server.start())
                resources.pop_all()
        except ConchError as error:
            with suppress(Exception):  # whatever Ray raises: it tells of this error as well
                await directory.failed.remote(INGRESS, one_line(error))
            raise RuntimeError(str(error)) from None
        node, here = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        reached = {
            kind: (here if host in ("0.0.0.0", "::") else host, port) for kind, (host, port) in addresses.items()
        }
        self._record = IngressRecord(self._id, node, reached)
        #: The revision of the directory's news that this has acted on.
        self._done = 0
        self._relay = Relay(f"http://{host_and_port(*reached['http'])}", f"grpc://{host_and_port(*reached['grpc'])}")
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def __del__(self) -> None:
        """Answer what is under way, and end.  Ray Serve calls and awaits this."""
        if not hasattr(self, "_watching"):
            return
        self._watching.cancel()
        try:
            async with asyncio.timeout(_RETRY_SECONDS):
                await self._directory.leave.remote(self._id)
        except Exception as error:  # whatever Ray raises; the directory finds out by itself
            LOG.warning("the directory does not answer: %s", one_line(error))
        await self._relay.close()
        try:
            await asyncio.to_thread(self._thread.run, self._server.stop())
        finally:
            await asyncio.to_thread(self._thread.close)

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Have the ``models`` of these names.  Ray Serve calls this before anything else, and when they change."""
        await asyncio.to_thread(self._thread.run, self._server.expect(config["models"]))
        await self._follow()

    async def _follow(self) -> None:
        async with self._following:  # one after the other
            revision = self._known.revision
            replicas = self._known.replicas
            if replicas != self._replicas:
                self._models, self._replicas = await asyncio.to_thread(cluster_models, replicas), replicas
            await asyncio.to_thread(self._thread.run, self._server.follow(self._models))
            self._done = revision

    async def _watch(self) -> None:
        """Follow what the directory says, for ever: without it, as it was."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answer = await self._directory.changes.remote(self._record, self._done)
                self._known.learn(answer, time.monotonic())
            except Exception as error:  # whatever Ray raises; the directory starts again
                LOG.warning("the directory does not answer: %s", one_line(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                await self._follow()
            except Exception:  # such as a full disk: the rest of the cluster goes on, and this is tried again
                LOG.exception("the ingress cannot follow what the directory says")
                await asyncio.sleep(_RETRY_SECONDS)
