"""The ingress of a node: conch's front ends over remote models that follow the cluster's replicas.

``IngressServer`` is the server, without Ray.  ``NodeIngress`` is its deployment, which watches the replica registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from conch.core.errors import ConchError, one_line
from conch.deploy.ray.planning import INGRESS
from conch.deploy.ray.registry import WATCH_SECONDS, IngressRecord, KnownReplicas, ReplicaRecord
from conch.deploy.ray.remote_models import ClusterModel, IngressRepository, cluster_models
from conch.library.app import Application
from conch.library.flags import plan
from conch.library.loop_thread import LoopThread

LOG: Final = logging.getLogger("conch")

#: The delay before calling the registry again if it did not respond (s).
RETRY_SECONDS: Final = 1.0
#: The timeout of a registry call, which may return late without changes (s).
_ANSWER_SECONDS: Final = 4 * WATCH_SECONDS


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """The configuration of every ingress; ``options`` are those of ``conch serve``.

    If models share replicas (``shared``), the first request for a model loads it and provides its inputs.
    """

    shared: bool = False
    drain_seconds: int = 30
    options: dict[str, Any] = field(default_factory=dict)

    def flags(self) -> dict[str, Any]:
        """Return the server's options; its models are those that replicas serve, regardless of what clients load."""
        control = {
            "model_control_mode": "on-demand" if self.shared else "none",
            "repository_poll_secs": 1,
            "exit_on_error": False,  # a model that cannot be served must not stop the others
        }
        return {"exit_timeout_secs": self.drain_seconds, **self.options, **control}


class IngressServer:
    """Listens from ``start`` to ``stop``; is ready when all models given to :meth:`expect` are.

    Runs on one event loop.
    """

    def __init__(self, spec: IngressSpec) -> None:
        self._spec = spec
        with ExitStack() as resources:
            folder = resources.enter_context(TemporaryDirectory(prefix="conch-ingress-"))
            self._plan = plan(None, folder, spec.flags(), ports=True)
            self._resources = resources.pop_all()
        self._repository = IngressRepository(Path(folder))
        self._application: Application | None = None
        self._expected: frozenset[str] = frozenset()
        self._loaded = False
        self._stopping = False
        #: Held while the repository or the models change.
        self._changing = asyncio.Lock()

    async def start(self) -> dict[str, tuple[str, int]]:
        """Listen; returns host and port of every front end.  Raises INTERNAL for a port in use."""
        try:
            self._application = application = Application(self._plan.settings)
            await application.listen()
        except BaseException:
            await self.stop()
            raise
        return dict(application.addresses)

    async def expect(self, names: Iterable[str]) -> None:
        """Serve exactly the models with these names from now on."""
        assert self._application is not None
        async with self._changing:
            self._expected = frozenset(names)
            for name in self._repository.written.keys() - self._expected:
                await asyncio.to_thread(self._repository.remove, name)
                await self._application.server.unload_removed(name)

    async def follow(self, models: Mapping[str, ClusterModel]) -> None:
        """Serve the expected models among ``models`` of the cluster."""
        async with self._changing:
            if not self._stopping:
                await self._follow({name: model for name, model in models.items() if name in self._expected})

    async def _follow(self, models: Mapping[str, ClusterModel]) -> None:
        assert self._application is not None
        server = self._application.server
        changed = await asyncio.to_thread(self._repository.write, models)
        if not self._loaded:
            if not self._expected or models.keys() != self._expected:
                return  # until then, clients get the error that the server is starting
            self._loaded = True
            await self._application.load_models()
        elif self._spec.shared:
            for name in changed:
                if server.versions_of(name):
                    await server.unload_removed(name)  # the next request loads it with its new inputs
        elif changed:
            for name, error in (await server.load_anew(changed)).items():
                LOG.warning("the ingress cannot serve '%s': %s", name, one_line(error))
        for name in self._repository.written:
            server.update_endpoints(name, models[name].urls if name in models else ())

    async def stop(self) -> None:
        """Refuse new requests, complete the others, close the ports."""
        self._stopping = True
        try:
            if self._application is not None:
                await self._application.stop(self._application.exit_seconds)
        finally:
            async with self._changing:
                await asyncio.to_thread(self._resources.close)


class NodeIngress:
    """The ingress of one node.  Its methods run on Ray Serve's event loop; its server has its own, in a thread.

    It is the root of the application, because Ray Serve runs the deployments that the root is bound to.  ``replicas``
    are their handles, which are never called.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, spec: IngressSpec, registry: Any, replicas: Sequence[Any] = ()
    ) -> None:
        import ray
        from ray import serve

        self._registry = registry
        self._id = serve.get_replica_context().replica_tag
        self._known = KnownReplicas()
        #: The replicas from which ``_models`` was made, because the registry returns every few seconds, mostly without
        #: changes.
        self._replicas: list[ReplicaRecord] = []
        self._models: Mapping[str, ClusterModel] = {}
        self._following = asyncio.Lock()
        try:
            async with AsyncExitStack() as resources:
                self._thread = LoopThread()
                resources.push_async_callback(asyncio.to_thread, self._thread.close)
                self._server = IngressServer(spec)
                addresses = await asyncio.to_thread(self._thread.run, self._server.start())
                resources.pop_all()
        except ConchError as error:
            with suppress(Exception):  # any exception of Ray, which also reports this error
                await registry.failed.remote(INGRESS, one_line(error))
            raise RuntimeError(str(error)) from None
        node, here = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        reachable = {
            kind: (here if host in ("0.0.0.0", "::") else host, port) for kind, (host, port) in addresses.items()
        }
        self._record = IngressRecord(self._id, node, reachable)
        #: The registry revision that this ingress follows.
        self._done = 0
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def __del__(self) -> None:
        """Complete the in-flight requests and end.  Ray Serve calls and awaits this."""
        if not hasattr(self, "_watching"):
            return
        self._watching.cancel()
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._registry.leave.remote(self._id)
        except Exception as error:  # any exception of Ray; the registry detects the end without it
            LOG.warning("the replica registry does not respond: %s", one_line(error))
        try:
            await asyncio.to_thread(self._thread.run, self._server.stop())
        finally:
            await asyncio.to_thread(self._thread.close)

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve the ``models`` with these names.  Ray Serve calls this first, and whenever they change."""
        await asyncio.to_thread(self._thread.run, self._server.expect(config["models"]))
        await self._follow()

    async def _follow(self) -> None:
        async with self._following:  # one at a time
            revision = self._known.revision
            replicas = self._known.replicas
            if replicas != self._replicas:
                self._models, self._replicas = await asyncio.to_thread(cluster_models, replicas), replicas
            await asyncio.to_thread(self._thread.run, self._server.follow(self._models))
            self._done = revision

    async def _watch(self) -> None:
        """Follow the registry forever; keep the known replicas while it does not respond."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    snapshot = await self._registry.watch.remote(self._record, self._done)
                self._known.learn(snapshot, time.monotonic())
            except Exception as error:  # any exception of Ray; the registry is restarted
                LOG.warning("the replica registry does not respond: %s", one_line(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                await self._follow()
            except Exception:  # such as a full disk: other ingresses continue, and this one retries
                LOG.exception("the ingress cannot follow the replica registry")
                await asyncio.sleep(RETRY_SECONDS)
