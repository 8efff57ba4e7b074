"""Turns the files of a model version into a running one: completes its configuration, starts its workers.

Called by the lifecycle, on the event loop.  Whatever fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from conch import logs
from conch.backends.table import BACKENDS
from conch.config import render
from conch.config.complete import ANY, PYTHON, complete, merge_completion
from conch.config.schema import InstanceGroup, ModelConfig
from conch.config.signature import parameters, signature
from conch.config.validate import check_directory_name, validate, validate_ensemble, validate_load
from conch.errors import invalid
from conch.repository.scan import ModelFiles
from conch.schedulers.ensemble import Ensemble, Member, Step
from conch.server.devices import environment_for
from conch.server.dispatch import Dispatcher
from conch.server.ensemble import EnsembleExecutor
from conch.server.instance import Instance
from conch.server.model import Model
from conch.server.scheduling import make_scheduler, preserves_ordering
from conch.settings import Settings
from conch.telemetry.statistics import ModelStatistics
from conch.workers.environment import worker_python
from conch.workers.process import WorkerProcess

LOG = logging.getLogger("conch")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance runs: its name, its kind and, for ``GPU``, the number of its device."""

    name: str
    kind: str
    device: int = 0


class Loader:
    """Makes :class:`Model` objects.

    ``find_member`` reaches a loaded model for a step of an ensemble; ``new_statistics`` makes the
    counters of a version as the metrics settings want them.
    """

    def __init__(
        self,
        settings: Settings,
        gpus: tuple[int, ...],
        find_member: Callable[[str, int], Member],
        new_statistics: Callable[[str, int], ModelStatistics],
    ) -> None:
        self._settings = settings
        self._gpus = gpus
        self._find_member = find_member
        self._new_statistics = new_statistics

    @property
    def completes(self) -> bool:
        """Whether configurations are completed from the models."""
        return not self._settings.disable_auto_complete_config

    def configure(self, files: ModelFiles) -> ModelConfig:
        """The configuration before any backend has looked at the model.

        Raises INVALID_ARG for a name that is not the directory's and for a model without a backend.
        """
        written = files.config
        check_directory_name(written, files.name)
        preference = PYTHON if written.backend == "python" or "model.py" in files.artefacts else ANY
        config = complete(written, files.name, files.artefacts, gpus=self._gpus, preference=preference)
        validate(config)
        return config

    async def load(self, files: ModelFiles, version: int, config: ModelConfig) -> Model:
        """Start one version of a model that is not an ensemble.  Raises the reason why it cannot run."""
        LOG.info("loading: %s:%d", files.name, version)
        begun = monotonic_ns()
        if config.backend not in BACKENDS:
            raise invalid(
                f"unable to find backend library for backend '{config.backend}', "
                "try specifying runtime on the model configuration."
            )
        if not self.completes:
            validate_load(config, self._gpus)
        starter = _Starter(files, version, config)
        first: WorkerProcess | None = None
        try:
            if self.completes:
                first, completed = await starter.complete()
                merged = _copy(config)
                merge_completion(merged, completed)
                validate_load(merged, self._gpus)
                config = starter.config = merged
            model = self._assemble(files, version, config, starter)
            placements = list(placements_of(config))
            dispatcher: Any = model.executor
            instances = [
                Instance(place.name, starter.launcher(place), dispatcher.available, dispatcher.lost)
                for place in placements
            ]
            dispatcher.serve(instances)
            workers = await _all_or_none(
                starter.launch(place, first if index == 0 else None) for index, place in enumerate(placements)
            )
        except BaseException:
            if first is not None:
                first.kill()
            raise
        for instance, worker in zip(instances, workers, strict=True):
            worker.on_sent = dispatcher.sent
            instance.adopt(worker)
        model.statistics.load_ns = monotonic_ns() - begun
        return model

    def load_ensemble(
        self, files: ModelFiles, version: int, config: ModelConfig, members: Mapping[str, Model]
    ) -> Model:
        """An ensemble over loaded ``members``; it has no process of its own."""
        LOG.info("loading: %s:%d", files.name, version)
        begun = monotonic_ns()
        validate_load(config, self._gpus)
        self.check_ensemble(config, members)
        config = _copy(config)
        if any(member.signature.decoupled for member in members.values()):
            config.model_transaction_policy.decoupled = True
        steps = [
            Step(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ]
        statistics = self._new_statistics(files.name, version)
        executor = EnsembleExecutor(Ensemble(signature(config, version), steps, self._find_member))
        statistics.load_ns = monotonic_ns() - begun
        return Model(config, version, executor, statistics, {**_inherited_labels(steps, members), **files.labels()})

    def check_ensemble(self, config: ModelConfig, members: Mapping[str, Model]) -> None:
        """Raise INVALID_ARG unless the steps of an ensemble fit the models that they name."""
        validate_ensemble(config, {name: member.config for name, member in members.items()})

    def _assemble(self, files: ModelFiles, version: int, config: ModelConfig, starter: _Starter) -> Model:
        statistics = self._new_statistics(files.name, version)
        scheduler = make_scheduler(config, signature(config, version), self._settings.max_pending_requests)
        dispatcher = Dispatcher(scheduler, statistics, preserve_ordering=preserves_ordering(config))
        return Model(config, version, dispatcher, statistics, files.labels())


class _Starter:
    """Starts the workers of one model version."""

    def __init__(self, files: ModelFiles, version: int, config: ModelConfig) -> None:
        self.config = config
        self._files = files
        self._version = version

    async def complete(self) -> tuple[WorkerProcess, ModelConfig]:
        """A worker that has completed the configuration, and what it made of it."""
        worker = self._start(f"{self.config.name}_0", dict(os.environ))
        try:
            answer = await worker.ask({"op": "complete"})
        except BaseException:
            worker.kill()
            raise
        return worker, render.from_json(answer["config"])

    def launcher(self, place: Placement) -> Callable[[], Awaitable[WorkerProcess]]:
        return lambda: self.launch(place, None)

    async def launch(self, place: Placement, worker: WorkerProcess | None) -> WorkerProcess:
        """A worker with an initialized instance: ``worker``, or a new one."""
        if worker is not None and place.kind == "GPU":
            await worker.stop()  # it was started without its device
            worker = None
        if worker is None:
            environment = environment_for(place.device) if place.kind == "GPU" else dict(os.environ)
            worker = self._start(place.name, environment)
        worker.name = place.name
        try:
            await worker.ask(
                {
                    "op": "start",
                    # The worker sees its device alone, so there the device is number 0.
                    "instance": {"name": place.name, "kind": place.kind, "device_id": 0},
                    "config": render.to_json(self.config),
                }
            )
        except BaseException:
            worker.kill()
            raise
        return worker

    def _start(self, name: str, environment: dict[str, str]) -> WorkerProcess:
        files, config = self._files, self.config
        worker = WorkerProcess(name)
        worker.start(
            {
                "backend": BACKENDS[config.backend],
                "model": {
                    "name": files.name,
                    "version": str(self._version),
                    "directory": str(files.directory),
                    "version_directory": str(files.version_directory(self._version)),
                    "filename": config.default_model_filename or "model.py",
                },
                "config": render.to_json(config),
                "log": log_levels(),
            },
            python=worker_python(parameters(config).get("EXECUTION_ENV_PATH", ""), files.directory),
            environment=environment,
        )
        return worker


def placements_of(config: ModelConfig) -> Iterator[Placement]:
    """One placement per instance, in the order of the configuration."""
    for group in config.instance_group:
        kind = InstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
        number = 0
        for device in group.gpus if kind == "GPU" else [0]:
            for _ in range(group.count):
                yield Placement(f"{group.name}_{number}", kind, device)
                number += 1


def log_levels() -> dict[str, Any]:
    """What a worker's logger is told about the server's log settings."""
    current = logs.current()
    return {
        "info": current.log_info,
        "warning": current.log_warning,
        "error": current.log_error,
        "verbose": current.log_verbose_level,
    }


async def _all_or_none(starts: Iterator[Awaitable[WorkerProcess]]) -> list[WorkerProcess]:
    """Wait for all workers; when one cannot start, end the others and raise its reason."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    failure = next((result for result in results if isinstance(result, BaseException)), None)
    workers = [result for result in results if isinstance(result, WorkerProcess)]
    if failure is not None:
        await asyncio.gather(*(worker.stop() for worker in workers))
        raise failure
    return workers


def _inherited_labels(steps: list[Step], members: Mapping[str, Model]) -> dict[str, Any]:
    return {
        tensor: labels
        for step in steps
        for output, tensor in step.outputs.items()
        if (labels := members[step.model].labels(output)) is not None
    }


def _copy(config: ModelConfig) -> ModelConfig:
    copy = ModelConfig()
    copy.CopyFrom(config)
    return copy
