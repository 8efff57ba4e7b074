"""The ingress of a node: conch's front ends over remote models that follow the cluster's replicas.

``IngressServer`` is the server, without Ray. ``NodeIngress`` is its deployment, which watches the replica registry.
``IngressRepository`` has a remote model for every model of the cluster; it writes files and is called in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from google.protobuf import text_format

from conch.config import render
from conch.config.remote import REMOTE, take_over
from conch.config.schema import ModelConfig, datatype
from conch.core.errors import ConchError, one_line
from conch.deploy.ray.planning import INGRESS
from conch.deploy.ray.registry import WATCH_SECONDS, IngressRecord, KnownReplicas, ReplicaRecord, ServedModel, by_model
from conch.library.app import Application
from conch.library.flags import plan
from conch.library.loop_thread import LoopThread

#: Inputs that contain a prompt, in order of preference.
_PROMPTS: Final = ("text_input", "prompt", "PROMPT", "QUERY")
#: Fields of a model's configuration that determine the form of requests. Only replicas use the others, which may be
#: those of another version of conch.
_TAKEN_OVER: Final = (
    "backend", "parameters", "max_batch_size", "input", "output", "model_transaction_policy", "sequence_batching",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """A model of the cluster: the URLs that serve it, its versions, and its configuration in an ingress.

    ``labels`` are the lines of its label files, by file name.

    ``generation`` changes when the inputs of a model without inputs in its configuration may have changed.
    """

    name: str
    urls: tuple[str, ...]
    versions: tuple[int, ...]
    config: str
    generation: str = ""
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()


def cluster_models(replicas: Iterable[ReplicaRecord]) -> dict[str, ClusterModel]:
    """Return the models of the replicas.

    If replicas of a model differ in its interface, as while it is replaced, only those that agree with the newest are
    used.
    """
    models = {}
    for name, served in by_model(replicas).items():
        newest = max(served, key=lambda pair: pair[0].started)[1]
        config = remote_config(newest, ())
        # Most replicas have equal configurations, so each distinct one is parsed only once.
        agreeing = {model for model in {model for _, model in served} if remote_config(model, ()) == config}
        urls = tuple(dict.fromkeys(_url(record, newest) for record, model in served if model in agreeing))
        generation = "" if newest.config else " ".join(sorted({record.version for record, _ in served}))
        labels = tuple((_label_file(index), names) for index, (_, names) in enumerate(newest.labels))
        models[name] = ClusterModel(
            name, urls, newest.versions or (1,), remote_config(newest, urls), generation, labels
        )
    return models


def _url(record: ReplicaRecord, model: ServedModel) -> str:
    """Return a replica's URL for a model: HTTP, which is cheaper, unless the model may send several responses."""
    if not model.config or json.loads(model.config).get("model_transaction_policy", {}).get("decoupled"):
        return record.grpc
    return record.http


def remote_config(model: ServedModel, urls: Sequence[str]) -> str:
    """Return the ``config.pbtxt`` of the remote model that represents ``model`` in an ingress."""
    written: dict[str, Any] = json.loads(model.config) if model.config else {}
    config = ModelConfig(name=model.name, backend=REMOTE)
    interface = json.dumps({key: written[key] for key in _TAKEN_OVER if key in written})
    take_over(config, render.from_json(interface, lenient=True))
    files = {output: _label_file(index) for index, (output, _) in enumerate(model.labels)}
    for output in config.output:
        output.label_filename = files.get(output.name, "")
    for key, value in _parameters(model.name, config, urls).items():
        config.parameters[key].string_value = value
    if model.versions:
        config.version_policy.specific.versions.extend(model.versions)
    return text_format.MessageToString(config)


def _label_file(index: int) -> str:
    """Return the name of a label file; an output's name may not be a valid file name."""
    return f"labels_{index}.txt"


def _parameters(name: str, config: ModelConfig, urls: Sequence[str]) -> Mapping[str, str]:
    parameters = {"url": ",".join(urls), "model": name}
    texts = {tensor.name for tensor in config.input if datatype(tensor.data_type) == "BYTES"}
    prompt = next((name for name in _PROMPTS if name in texts), "")
    stateless = not config.HasField("sequence_batching") and not config.model_transaction_policy.decoupled
    if prompt:
        parameters["affinity"] = prompt
    if stateless and config.input:
        parameters["repeat_lost"] = "true"
    if config.input:
        parameters["version"] = "same"
    else:  # one of many models that share the replicas, sent to where it is loaded
        parameters["sticky"] = "true"
    return parameters


@dataclass
class IngressRepository:
    """The model repository of an ingress, in ``directory``.

    ``written`` has the written configuration of each model, and the part of it that does not depend on URLs.
    """

    directory: Path
    written: dict[str, tuple[str, str]] = field(default_factory=dict)

    def write(self, models: Mapping[str, ClusterModel]) -> list[str]:
        """Write new and changed models; returns the names of those with a changed interface.

        Changed URLs alone do not count: the executors of loaded models get them directly, and the files are for loads.
        """
        changed = []
        for name, model in models.items():
            config = model.config.replace(",".join(model.urls), "")
            essence = f"{model.generation} {model.versions} {hash(model.labels)} {config}"
            written, before = self.written.get(name, ("", ""))
            if written != model.config or essence != before:
                self._write(model)
            self.written[name] = model.config, essence
            if essence != before:
                changed.append(name)
        return changed

    def remove(self, name: str) -> None:
        """Remove a model."""
        del self.written[name]
        shutil.rmtree(self.directory / name)

    def _write(self, model: ClusterModel) -> None:
        folder = self.directory / model.name
        for version in model.versions:
            (folder / str(version)).mkdir(parents=True, exist_ok=True)
        draft = self.directory / f".{model.name}"
        lines = [(name, "".join(f"{label}\n" for label in labels)) for name, labels in model.labels]
        for name, text in [*lines, ("config.pbtxt", model.config)]:
            draft.write_text(text, encoding="utf-8")
            draft.replace(folder / name)  # atomic, because a load may be reading it


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
        """Listen; returns host and port of every front end. Raises INTERNAL for a port in use."""
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
            for name, error in (await server.load_changed(changed)).items():
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
    """The ingress of one node. Its methods run on Ray Serve's event loop; its server has its own, in a thread.

    It is the root of the application, because Ray Serve runs the deployments that the root is bound to. ``replicas``
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
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        reachable = {
            kind: (address if host in ("0.0.0.0", "::") else host, port) for kind, (host, port) in addresses.items()
        }
        self._record = IngressRecord(self._id, node, reachable)
        #: The registry revision that this ingress follows.
        self._done = 0
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that completes the in-flight requests and ends; None if there is nothing to end.

        Ray Serve calls this and awaits the coroutine. Python calls it again when the object is freed.
        """
        watching = self.__dict__.pop("_watching", None)
        return self._end(watching) if watching is not None else None

    async def _end(self, watching: asyncio.Task[None]) -> None:
        watching.cancel()
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
        """Serve the ``models`` with these names. Ray Serve calls this first, and whenever they change."""
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
