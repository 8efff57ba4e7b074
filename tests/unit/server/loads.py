"""Loads of models without processes: a loader that does what the test says, and repositories on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.config.schema import ModelConfig, is_ensemble
from conch.core.errors import invalid
from conch.core.inference import InferRequest
from conch.core.tensors import WireTensor
from conch.repository.fingerprint import take_external
from conch.repository.model_files import ModelFiles
from conch.repository.scan import ModelRepository
from conch.server.execution.executor import Executor
from conch.server.model import Model
from conch.server.models.lifecycle import Lifecycle
from conch.server.models.memory import MemoryLedger
from conch.server.models.model_loader import ModelLoader
from conch.server.models.states import ModelTable, State
from conch.server.models.versions import ServingVersions
from conch.telemetry.metrics import Registry
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.process import WorkerProcess
from tests.events import TIMEOUT
from tests.unit.server.fakes import Answers

CONFIG = 'backend: "python" input [{name: "x" data_type: TYPE_FP32 dims: [1]}] '
CONFIG += 'output [{name: "y" data_type: TYPE_FP32 dims: [1]}] '


class FakeExecutor(Executor):
    """Keeps requests until the test answers them."""

    processes: Sequence[WorkerProcess] = ()

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.stopped: list[float | None] = []
        self.retired = False

    def submit(self, request: InferRequest) -> None:
        self.requests.append(request)

    def retire(self) -> None:
        self.retired = True

    async def stop(self, seconds: float | None) -> None:
        self.stopped.append(seconds)


class FakeLoader:
    """Makes models that run nothing.

    ``held`` lets a load of that name, or ``name:version``, wait; ``failures`` are raised in turn.
    A load of a model among ``stalled`` stands still; ``limited`` is when the rate limiter begins to count instances.
    """

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self.log: list[str] = []
        self.made: list[Model] = []
        self.rescaled: list[tuple[Model, ModelConfig]] = []
        self.limited = False
        self.stalled: set[str] = set()
        #: Files outside of the model directory that loads read, by model.
        self.external: dict[str, Path] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.failures: dict[str, list[Exception]] = {}
        self.in_flight = 0
        self.most_under_way = 0

    def configure(self, files: ModelFiles) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(files.config)
        config.name = files.name
        return config

    async def load(
        self,
        files: ModelFiles,
        version: int,
        config: ModelConfig,
        steps: Mapping[str, str],
        on_stalled: Callable[[], None],
    ) -> Model:
        if is_ensemble(config):
            self.log.append(f"ensemble {files.name} of {','.join(sorted(self.check_ensemble(config, steps)))}")
            return self._model(config, version, files.namespace, steps)
        key = f"{files.name}:{version}"
        self.log.append(f"load {key}")
        if files.name in self.stalled:
            on_stalled()
            on_stalled()
        self.in_flight += 1
        self.most_under_way = max(self.most_under_way, self.in_flight)
        try:
            for held in {files.name, key} & self.held.keys():
                await self.held[held].wait()
        finally:
            self.in_flight -= 1
        if self.failures.get(key):
            raise self.failures[key].pop(0)
        self.log.append(f"loaded {key}")
        model = self._model(config, version, files.namespace)
        model.external = take_external(path for name, path in self.external.items() if name == files.name)
        return model

    def can_rescale(self, model: Model, config: ModelConfig) -> bool:
        return not self.limited

    async def rescale(
        self, model: Model, files: ModelFiles, config: ModelConfig, on_stalled: Callable[[], None]
    ) -> None:
        self.rescaled.append((model, config))

    def check_ensemble(self, config: ModelConfig, keys: Mapping[str, str]) -> Mapping[str, Model]:
        models = self._table.step_models(config, keys)
        for step in config.ensemble_scheduling.step:
            if step.model_name not in models:
                raise invalid(f"ensemble '{config.name}' has no step model '{step.model_name}'")
        return models

    def _model(self, config: ModelConfig, version: int, namespace: str, keys: Mapping[str, str] | None = None) -> Model:
        statistics = ModelStatistics(config.name, version)
        model = Model(config, version, FakeExecutor(), statistics, {}, namespace=namespace, steps=keys)
        self.made.append(model)
        return model


class House:
    """A repository in ``root`` and everything that loads its models, over a fake loader."""

    def __init__(
        self,
        root: Path,
        *others: Path,
        ledger: MemoryLedger | None = None,
        parallel_loads: int = 4,
        retries: int = 0,
    ) -> None:
        self.root = root
        repository = ModelRepository([root, *others], namespacing=bool(others))
        self.table = ModelTable(repository.naming)
        self.loader = FakeLoader(self.table)
        self.registry = Registry()
        ledger = ledger or MemoryLedger(self.table)
        models = ModelLoader(
            repository,
            self.loader,  # type: ignore[arg-type]
            self.table,
            ServingVersions(self.table, self.registry, ledger),
            ledger,
            asyncio.Semaphore(parallel_loads),
            retries,
        )
        self.lifecycle = Lifecycle(models)

    def write(self, name: str, text: str = "", versions: tuple[int, ...] = (1,), content: str = "") -> None:
        """Write a model; another ``content`` makes its versions new, another ``text`` its configuration."""
        for version in versions:
            file = self.root / name / str(version) / "model.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists() or file.read_text() != content:
                file.write_text(content)
        (self.root / name / "config.pbtxt").write_text(text or CONFIG)

    def write_ensemble(self, name: str, *step_models: str) -> None:
        steps = ", ".join(
            f'{{model_name: "{step_model}" model_version: -1 input_map {{key: "x" value: "t{index}"}} '
            f'output_map {{key: "y" value: "t{index + 1}"}}}}'
            for index, step_model in enumerate(step_models)
        )
        self.write(
            name,
            CONFIG.replace('backend: "python"', 'platform: "ensemble"') + f"ensemble_scheduling {{step [{steps}]}}",
        )

    def states(self, name: str) -> dict[int, tuple[State, str]]:
        versions = self.table.models[name].versions
        return {version: (version_state.state, version_state.reason) for version, version_state in versions.items()}

    def submit(self, model: Model) -> Answers:
        answers = Answers()
        model.infer(InferRequest(model.name, {"x": WireTensor("x", "FP32", (1,), bytes(4))}, answers))
        return answers


def stopped(model: Model) -> list[float | None]:
    """The deadlines with which the model's executor was stopped."""
    executor = model.executor
    assert isinstance(executor, FakeExecutor)
    return executor.stopped


async def until(condition: Any) -> None:
    """Turns of the loop, with threads under way that read disks, until something is so."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0)
