"""Starts workers for the instances of a model version.

Called by the loader and, after the death of a worker, by its ``SupervisedWorker``. Runs on the event loop in the main
thread: workers end with the thread that starts them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any, Final

from conch.backends.table import BACKENDS
from conch.config import render
from conch.config.complete import merge_completion
from conch.config.reading import read_small, refuse
from conch.config.schema import InstanceGroup, ModelConfig, copied, datatype, implementation
from conch.config.signature import parameters
from conch.config.validate import warmup_problems, warmup_size_problem
from conch.core.errors import ConchError, internal, invalid
from conch.core.inference import InferRequest, InferResponse, ignore
from conch.core.tensors import ELEMENT_SIZE, WireTensor
from conch.machine import logs
from conch.machine.facts import environment_for
from conch.machine.memory import resident_bytes
from conch.options.settings import Settings
from conch.repository.model_files import ModelFiles
from conch.server.runtime_facts import sentence
from conch.workers.host.bls import BlsServer
from conch.workers.host.environment import Environments, activated
from conch.workers.host.liveness import WorkerTimeouts
from conch.workers.host.process import WorkerProcess
from conch.workers.host.templates import TemplateKind, Templates

# Warmup runs on the event loop after the start of a worker; a failed sample fails the load. Source: Triton's model
# warmup.


#: Minimum size of a sample's request (bytes); the event loop spends as much time on a smaller request.
_REQUEST_BYTES: Final = 4096
#: Size of the pieces in which random data is created (bytes); other threads run between them.
_PIECE: Final = 1 << 20
#: Size of an empty BYTES element (bytes).
_EMPTY_TEXT: Final = 4
#: Translates a random byte to a BOOL value.
_TRUTH: Final = bytes(byte & 1 for byte in range(256))
#: Maximum size of a data file (bytes).
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A warmup sample: ``batch_size`` requests with the same inputs, run ``count`` times."""

    name: str
    batch_size: int
    count: int
    inputs: tuple[WireTensor, ...]


def read_samples(config: ModelConfig, directory: Path, limit: int) -> list[WarmupSample]:
    """Read the samples of a model in ``directory``; call it in a thread, because they may be large.

    Raises INVALID_ARG if a sample is incomplete or exceeds ``limit`` bytes, or if its file is too small; INTERNAL if a
    file cannot be read.
    """
    refuse(warmup_problems(config))
    for setting in config.model_warmup:
        if setting.batch_size:
            size = sum(_size(value, directory) for value in setting.inputs.values())
            total = setting.batch_size * max(size, _REQUEST_BYTES)
            if total > limit:
                raise invalid(
                    f"warmup sample '{setting.name}' has {total} bytes in {setting.batch_size} requests; at most"
                    f" {limit} are allowed. Use --max-warmup-bytes to increase the limit."
                )
    return [
        WarmupSample(
            setting.name,
            setting.batch_size,
            max(setting.count, 1),
            tuple(_tensor(name, value, config, directory) for name, value in sorted(setting.inputs.items())),
        )
        for setting in config.model_warmup
        if setting.batch_size
    ]


async def warm_up(worker: WorkerProcess, config: ModelConfig, samples: list[WarmupSample]) -> None:
    """Run all samples on a worker, then raise INVALID_ARG with all failures, if any."""
    outputs = tuple(output.name for output in config.output)
    failures = []
    for sample in samples:
        try:
            for _ in range(sample.count):
                await _run(worker, config.name, outputs, sample)
        except ConchError as error:
            failures.append(f"failed to run warmup sample '{sample.name}': {error.message}; ")
    if failures:
        raise invalid("".join(failures))


async def _run(worker: WorkerProcess, model: str, outputs: tuple[str, ...], sample: WarmupSample) -> None:
    """Run a sample once and wait for all its requests. Raises the first error of a response."""
    left = sample.batch_size
    ended = asyncio.get_running_loop().create_future()

    def on_response(response: InferResponse) -> None:
        nonlocal left
        left -= response.final
        if response.error is not None and not ended.done():
            ended.set_exception(response.error)
        elif not left and not ended.done():
            ended.set_result(None)

    requests = [
        InferRequest(model, {tensor.name: tensor for tensor in sample.inputs}, on_response, outputs=outputs)
        for _ in range(sample.batch_size)
    ]
    worker.execute(requests, ignore)  # warm-up is not part of the statistics
    await ended


def _tensor(name: str, value: Any, config: ModelConfig, directory: Path) -> WireTensor:
    kind = datatype(value.data_type)
    batch = (1,) if config.max_batch_size > 0 else ()
    shape = (*batch, *value.dims)
    if value.WhichOneof("input_data_type") == "input_data_file":
        return WireTensor(name, kind, shape, _read(value.input_data_file, kind, shape, directory))
    size = ELEMENT_SIZE.get(kind, _EMPTY_TEXT) * prod(shape)
    if kind == "BYTES" or value.WhichOneof("input_data_type") == "zero_data":
        return WireTensor(name, kind, shape, bytes(size))
    return WireTensor(name, kind, shape, _random(size, kind))


def _random(size: int, kind: str) -> bytes:
    pieces = (os.urandom(min(_PIECE, size - start)) for start in range(0, size, _PIECE))
    return b"".join([piece.translate(_TRUTH) if kind == "BOOL" else piece for piece in pieces])


def _size(value: Any, directory: Path) -> int:
    """The size of an input in bytes, without creating or reading it."""
    if value.WhichOneof("input_data_type") == "input_data_file":
        try:
            return _path(value.input_data_file, directory).stat().st_size
        except OSError:
            return 0  # reading it raises the error
    count: int = prod(value.dims)
    return ELEMENT_SIZE.get(datatype(value.data_type), _EMPTY_TEXT) * count


def _path(file: str, directory: Path) -> Path:
    folder = (directory / "warmup").resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise internal(f"warmup data file '{file}' must be inside the folder 'warmup' of the model")
    return path


def _read(file: str, kind: str, shape: tuple[int, ...], directory: Path) -> bytes:
    try:
        data = read_small(_path(file, directory), _MOST_BYTES)
    except OSError as error:
        raise internal(f"failed to read warmup data file '{file}': {error.strerror}") from error
    if kind == "BYTES":
        return data
    expected = ELEMENT_SIZE[kind] * prod(shape)
    if len(data) < expected:
        raise warmup_size_problem(file, expected, len(data))
    return data[:expected]


LOG = logging.getLogger("conch")

#: Interval between checks of a load (s).
CHECK_SECONDS = 1.0
#: Interval between log lines about a load in progress (s).
PROGRESS_SECONDS = 5.0
#: Idle time after which a load is stalled and releases its load slot (s).
STALLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """The placement of a worker: its name, its kind (``CPU``, ``GPU``, ``MODEL``) and, on a GPU, its device.

    ``count`` is its number of instances, with a thread each; a worker of a Python model has one. ``signature`` is the
    rest of the instance group, such as its rate limiter; a different signature means different instances.
    """

    name: str
    kind: str
    device: int = 0
    count: int = 1
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """Services shared by the workers of all models.

    ``new_process`` creates a worker process, not started yet, from its name and an optional function that spawns it;
    ``templates`` fork workers, if given; ``bls`` serves their requests to other models; ``environments`` have their
    interpreters.
    """

    new_process: Callable[..., WorkerProcess] = WorkerProcess
    templates: Templates | None = None
    bls: BlsServer | None = None
    environments: Environments = field(default_factory=Environments)


class WorkerStarter:
    """Starts workers of a model version with ``config``, its effective configuration.

    ``backend_config`` has the backend's settings. ``on_stalled`` is called while a loading worker neither computes nor
    reads. ``warmup_limit`` is the maximum size of a warm-up sample (bytes).
    """

    def __init__(
        self,
        files: ModelFiles,
        version: int,
        config: ModelConfig,
        services: WorkerServices,
        on_stalled: Callable[[], None],
        backend_config: Mapping[str, str],
        warmup_limit: int,
    ) -> None:
        self.config = config
        self._files = files
        self._version = version
        self._services = services
        self._on_stalled = on_stalled
        self._backend_config = backend_config
        self._warmup_limit = warmup_limit
        self._said: set[str] = set()
        #: The worker that completed the configuration, until it is launched at a placement.
        self._first: WorkerProcess | None = None

    async def complete(self) -> None:
        """Let the model complete the configuration, in a worker that the first launch uses. Raises its error."""
        environment = dict(os.environ)
        self._first = worker = await self._start(f"{self.config.name}_0", environment, await self._kind(environment))
        async with self._followed(worker):
            reply = await worker.ask({"op": "complete"})
        self.config = copied(self.config)
        merge_completion(self.config, render.from_json(reply["config"]))

    def kill_unused(self) -> None:
        """Kill the worker that completed the configuration unless it has been launched."""
        if self._first is not None:
            self._first.kill()

    async def launch(self, placement: WorkerPlacement) -> WorkerProcess:
        """Start a worker at ``placement``; initialize and warm up its model."""
        worker = await self._worker_at(placement)
        worker.name = placement.name
        try:
            config = render.to_json(self.config)
            async with self._followed(worker):
                reply = await worker.ask({"op": "start", "instance": instance_fields(placement), "config": config})
                worker.slots = reply.get("slots", 0)
                worker.runtime_facts = self._runtime_facts(placement, reply.get("runs_with", {}))
                worker.dependencies = [(kind, text) for kind, text in reply.get("dependencies", ())]
                samples = await asyncio.to_thread(read_samples, self.config, self._files.directory, self._warmup_limit)
                await warm_up(worker, self.config, samples)
        except BaseException:
            worker.kill()
            raise
        worker.loading = False
        LOG.info(
            "instance %s of '%s' version %d%s: %s",
            placement.name,
            self.config.name,
            self._version,
            f" (one of {placement.count} over the same weights)" if placement.count > 1 else "",
            sentence(worker.runtime_facts),
        )
        return worker

    async def _worker_at(self, placement: WorkerPlacement) -> WorkerProcess:
        """Return a worker that can run at ``placement``: the one that completed the configuration, or a new one."""
        first, self._first = self._first, None
        try:
            if placement.kind == "GPU":
                if first is not None:
                    await first.stop()  # it was started without the device in its environment
                return await self._start(placement.name, environment_for(placement.device))
            environment = dict(os.environ)
            kind = await self._kind(environment)
            worker = first or await self._start(placement.name, environment, kind)
            return worker if kind is None else await self._sharing(placement, worker, environment, kind)
        except BaseException:
            if first is not None:
                first.kill()
            raise

    @asynccontextmanager
    async def _followed(self, worker: WorkerProcess) -> AsyncIterator[None]:
        """Log the progress of a worker every few seconds during the block."""
        following = asyncio.get_running_loop().create_task(self._follow(worker))
        try:
            yield
        finally:
            following.cancel()

    async def _follow(self, worker: WorkerProcess) -> None:
        start = logged_at = monotonic()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if worker.verdict.idle >= STALLED_SECONDS:
                self._on_stalled()
            if monotonic() < logged_at + PROGRESS_SECONDS:
                continue
            logged_at = monotonic()
            memory = resident_bytes(worker.pid)
            LOG.info(
                "still loading '%s' version %d after %.0f s%s",
                self.config.name,
                self._version,
                monotonic() - start,
                f": its worker (pid {worker.pid}) has {memory / 1e9:.2f} GB in memory" if memory else "",
            )

    def _runtime_facts(self, placement: WorkerPlacement, reported: Mapping[str, str]) -> dict[str, str]:
        """The facts that a worker reports, with its device and the maximum batch size."""
        facts = dict(reported)
        if placement.kind != "MODEL":
            facts["device"] = f"GPU {placement.device}" if placement.kind == "GPU" else "CPU"
        if self.config.max_batch_size > 0:
            facts["max_batch_size"] = str(self.config.max_batch_size)
        return facts

    async def _sharing(
        self, placement: WorkerPlacement, worker: WorkerProcess, environment: dict[str, str], kind: TemplateKind
    ) -> WorkerProcess:
        """Replace ``worker`` by a worker that shares its model's imports with others, if there are any.

        ``worker`` reads the model's files to find the imports, and ends if it is replaced.
        """
        try:
            async with self._followed(worker):
                reply = await worker.ask({"op": "preloads", "instance": instance_fields(placement)})
            if not reply["modules"]:
                return worker
            sharing = kind.sharing(reply["modules"], reply["environment"])
            shared = await self._start(placement.name, environment, sharing)
        except BaseException:
            worker.kill()
            raise
        worker.kill()
        return shared

    async def _kind(self, environment: Mapping[str, str]) -> TemplateKind | None:
        """The kind of worker template for this model; None if its workers are not forked from a template."""
        if self._services.templates is None:
            return None
        module = BACKENDS[implementation(self.config)].implementation.partition(":")[0]
        return self._services.templates.kind_of(await self._python(), environment, module)

    async def _python(self) -> str:
        execution_env_path = parameters(self.config).get("EXECUTION_ENV_PATH", "")
        if not execution_env_path and self._files.backend_directory is not None:
            execution_env_path = await asyncio.to_thread(self._files.backend_environment)
        return await self._services.environments.python(execution_env_path, self._files.directory)

    async def _start(self, name: str, environment: dict[str, str], kind: TemplateKind | None = None) -> WorkerProcess:
        """Start a process for the model version, with the Python interpreter that the model requires.

        It is forked from a worker template of ``kind`` if possible.
        """
        python = await self._python()
        if python != sys.executable:
            environment = await asyncio.to_thread(activated, environment, python)
        start_timeout = self._start_timeout()
        worker = await self._new_process(name, environment, kind)
        worker.said = self._said
        worker.model = self._files.name
        worker.loading = True
        worker.reschedules = self.config.sequence_batching.iterative_sequence
        if start_timeout is not None:
            worker.timeouts = replace(worker.timeouts, start=start_timeout)
        if self._services.bls is not None:
            worker.calls.serve_bls(self._services.bls, self._files.name)
        frame = init_frame(self._files, self._version, self.config, self._backend_config)
        worker.start(frame, python=python, environment=environment)
        return worker

    async def _new_process(self, name: str, environment: dict[str, str], kind: TemplateKind | None) -> WorkerProcess:
        """Create a worker, not started yet, that its template forks if possible."""
        new_process = self._services.new_process
        if kind is None or self._services.templates is None:
            return new_process(name)
        forked = await self._services.templates.fork(kind, environment)
        if forked is None:
            return new_process(name)
        try:
            return new_process(name, forked.take)
        except BaseException:  # the server is stopping
            forked.discard()
            raise

    def _start_timeout(self) -> float | None:
        """Return Triton's ``stub-timeout-seconds``, the Python backend's timeout for starts without the model (s).

        Raises INVALID_ARG if it is not a whole number of seconds.
        """
        text = self._backend_config.get("stub-timeout-seconds")
        if text is None or implementation(self.config) != "python":
            return None
        if not (text.isascii() and text.isdigit()):
            raise invalid(f"--backend-config: stub-timeout-seconds is '{text}'; it must be a whole number of seconds")
        return float(text)


def init_frame(
    files: ModelFiles, version: int, config: ModelConfig, backend_config: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The first IPC message to a worker: describes the model version to its backend."""
    return {
        "backend": BACKENDS[implementation(config)].implementation,
        "backend_config": dict(backend_config or {}),
        "model": {
            "name": files.name,
            "version": str(version),
            "directory": str(files.directory),
            "version_directory": str(files.version_directory(version)),
            "filename": config.default_model_filename,
            "backend_directory": str(files.backend_directory or ""),
        },
        "config": render.to_json(config),
        "log": log_levels(),
    }


def instance_fields(placement: WorkerPlacement) -> dict[str, Any]:
    """The field ``instance`` of a message to the worker at ``placement``; its only visible device has number 0."""
    return {"name": placement.name, "kind": placement.kind, "device_id": 0, "count": placement.count}


def placements_of(config: ModelConfig) -> Iterator[WorkerPlacement]:
    """Yield the placement of each worker, in the order of the configuration."""
    instances = [placement for _, placement in instances_of(config)]
    if not BACKENDS[implementation(config)].shared:
        yield from instances
        return
    for kind, device in dict.fromkeys((placement.kind, placement.device) for placement in instances):
        group = [placement for placement in instances if (placement.kind, placement.device) == (kind, device)]
        yield replace(group[0], count=len(group), signature=b"".join(placement.signature for placement in group))


def instances_of(config: ModelConfig) -> Iterator[tuple[InstanceGroup, WorkerPlacement]]:
    """Yield the group of each instance and its placement in a separate worker."""
    for group in config.instance_group:
        kind = InstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
        signature = _signature(group)
        number = 0
        for device in group.gpus if kind == "GPU" else [0]:
            for _ in range(group.count):
                yield group, WorkerPlacement(f"{group.name}_{number}", kind, device, signature=signature)
                number += 1


def _signature(group: InstanceGroup) -> bytes:
    """The settings that distinguish instance groups, without their names, kinds, counts and devices."""
    rest = InstanceGroup()
    rest.CopyFrom(group)
    for name in ("name", "kind", "count", "gpus"):
        rest.ClearField(name)
    return bytes(rest.SerializeToString(deterministic=True))


def compare_placements(
    running: Sequence[WorkerPlacement], required: Sequence[WorkerPlacement]
) -> tuple[list[WorkerPlacement], list[WorkerPlacement]]:
    """The ``running`` placements to keep because they match ``required`` placements, and the placements to start.

    Names are ignored, as in Triton: a worker that matches except for its name keeps its old name. A new worker gets a
    name that no kept worker has.
    """
    left, missing = list(running), []
    kept = []
    for placement in required:
        if placement in left:
            left.remove(placement)
            kept.append(placement)
        else:
            missing.append(placement)
    new = []
    for placement in missing:
        equal = next((other for other in left if replace(other, name=placement.name) == placement), None)
        if equal is None:
            new.append(placement)
        else:
            left.remove(equal)
            kept.append(equal)
    names = {placement.name: None for placement in kept}
    for index, placement in enumerate(new):
        free = (name for name in (placement.name, *(other.name for other in required)) if name not in names)
        new[index] = replace(placement, name=next(free))
        names[new[index].name] = None
    return kept, new


def log_levels() -> dict[str, Any]:
    """The server's log settings as fields of a ``log`` message."""
    current = logs.current()
    return {
        "info": current.log_info,
        "warning": current.log_warning,
        "error": current.log_error,
        "verbose": current.log_verbose_level,
    }


def worker_timeouts(settings: Settings) -> WorkerTimeouts:
    """The timeouts of every worker."""
    return WorkerTimeouts(
        stopped=settings.stopped_worker_secs,
        silent=settings.silent_worker_secs,
        execution=settings.execute_timeout_secs,
        step=settings.step_timeout_secs,
        load_idle=settings.load_idle_secs,
        load=settings.load_timeout_secs,
        unload=settings.unload_timeout_secs,
        finalize=settings.finalize_timeout_secs,
    )
