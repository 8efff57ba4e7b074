"""The memory ledger: the memory that each model uses and that a load needs; refuses loads that do not fit.

A model is measured after it is loaded and before it is unloaded; callers that read the figures call ``refresh`` for new
ones. Runs on the event loop; processes and directories are read in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from time import monotonic
from typing import Final

from conch.backends.table import BACKENDS
from conch.config.remote import is_remote
from conch.config.schema import ModelConfig, implementation, is_ensemble
from conch.config.signature import parameters
from conch.core.errors import ConchError, unavailable
from conch.machine.memory import FreeMemory, ProcessReader, free_memory, mebibytes
from conch.machine.threads import compute
from conch.repository.model_files import ModelFiles
from conch.repository.weights import WeightFiles, find_weights
from conch.server.execution.starting import placements_of
from conch.server.model import Model
from conch.server.models.states import ModelTable
from conch.telemetry.memory import ModelMemory, total_memory

LOG = logging.getLogger("conch")

#: Maximum age of the figures for clients (s); a measurement takes milliseconds per gigabyte.
FRESH_SECONDS: Final = 2.0
#: Approximate memory of a worker without weights, by backend (bytes); includes the libraries of engines, which workers
#: that are forked from the same template share.
_WORKER_BYTES: Final = {"python": 32 << 20, "onnxruntime": 96 << 20, "openvino": 160 << 20}
_OTHER_WORKER_BYTES: Final = 420 << 20


class MemoryLedger:
    """The memory of the models in ``table``.

    ``checks`` is False if :meth:`check` refuses nothing. ``reader`` and ``read_free`` read the machine's memory.
    ``templates`` returns the process ids of worker templates, whose memory belongs to no model.
    """

    def __init__(
        self,
        table: ModelTable,
        *,
        checks: bool = True,
        reader: ProcessReader | None = None,
        read_free: Callable[[], FreeMemory] = free_memory,
        templates: Callable[[], list[int]] = list,
    ) -> None:
        self._table = table
        self._checks = checks
        self._reader = reader or ProcessReader()
        self._read_free = read_free
        self._templates = templates
        #: Memory of the worker templates at the last measurement (bytes).
        self.template_bytes = 0
        self._measured_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    def used(self, name: str = "") -> ModelMemory:
        """Return the last measured memory of the versions of a model that serve, or of all models without a name."""
        return total_memory(model.statistics.memory for model in self._table.loaded() if name in ("", model.name))

    async def free(self) -> FreeMemory:
        """Return the free memory of the machine or of the server's control group. Raises OSError if it is unknown."""
        return await compute(self._read_free)

    async def gpu_free(self) -> dict[int, int]:
        """Return the free memory of each GPU (bytes), by the driver's number; empty without NVML."""
        return await compute(self._reader.gpu_free)

    async def measure(self, models: Iterable[Model] | None = None) -> None:
        """Measure ``models``, or all models that serve, and store the results in their statistics."""
        chosen = list(self._table.loaded() if models is None else models)
        regions = [sum(process.shared_bytes for process in model.executor.processes) for model in chosen]
        pids = [[process.pid for process in model.executor.processes] for model in chosen]
        *measured, templates = await compute(self._reader.read, [*pids, self._templates()])
        self.template_bytes = templates.host
        for model, shared, seen in zip(chosen, regions, measured, strict=True):
            model.statistics.memory = replace(
                model.statistics.memory,
                workers=seen.host - min(seen.shared, shared),
                shared_regions=shared,
                gpus=seen.gpus,
                kv_cache=model.statistics.generation.cache_bytes if model.statistics.generation is not None else 0,
            )

    def refresh(self) -> None:
        """Start a measurement of all models unless the last one is recent; returns at once."""
        if self._refreshing is None and monotonic() - self._measured_at > FRESH_SECONDS:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def expected(self, files: ModelFiles, versions: Iterable[int], config: ModelConfig) -> ModelMemory:
        """Return the memory that these versions of a model will use when they are loaded.

        For a version that was loaded before, this is its last measurement. Otherwise it is an estimate: a worker with
        its libraries for each placement, and the weight files once on each device. KV caches and memory that the model
        allocates while it runs are not included.
        """
        model_state = self._table.models.get(files.key)
        known = model_state.memory if model_state is not None else {}
        estimates = []
        for version in versions:
            memory = known.get(version)
            estimates.append(memory if memory is not None else await self._estimate(files, version, config))
        return total_memory(estimates)

    async def check(self, files: ModelFiles, version: int, config: ModelConfig) -> None:
        """Raise UNAVAILABLE, with the amounts, if the weights of a version are larger than the free memory.

        Compares the minimum memory of the version (the variants of a converted model that run, or the smallest form of
        the weights in another folder, in the smallest number format that its parameters allow) with all memory that the
        system could free, including files mapped by other models. Models of the backend ``python`` are never refused,
        because it is unknown how they read their files.
        """
        runs_on = implementation(config)
        if not self._checks or is_ensemble(config) or runs_on == "python" or runs_on not in BACKENDS:
            return
        weights = await asyncio.to_thread(_weights, files, version, config)
        if not weights.least:
            return
        try:
            free = await self.free()
        except (OSError, ValueError, KeyError):
            return
        gpu_free: dict[int, int] | None = None
        needed = 0
        for placement in placements_of(config):
            if placement.kind != "GPU":
                needed += weights.least
                continue
            if gpu_free is None:
                gpu_free = await self.gpu_free()
            # The number of a visible device may differ from the driver's, unless the machine has only one.
            if len(gpu_free) == 1 and weights.least // 2 > gpu_free[0]:
                raise _too_large(files, version, weights, f"the GPU has {mebibytes(gpu_free[0])} left")
        if needed > free.available:
            raise _too_large(files, version, weights, self._sum(free))

    async def note_load(self, model: Model, files: ModelFiles) -> None:
        """Measure a version that has just been loaded, and log its memory.

        If it cannot be measured, it counts as :meth:`expected` until the next measurement.
        """
        if is_ensemble(model.config):
            return
        weights = await asyncio.to_thread(_weights, files, model.version, model.config)
        model.statistics.memory = replace(model.statistics.memory, weights=weights.size)
        try:
            await self.measure([model])
        except Exception:
            LOG.exception("failed to measure the memory of '%s' version %d", model.name, model.version)
            model.statistics.memory = await self.expected(files, [model.version], model.config)
            return
        LOG.info("'%s' version %d uses %s", model.name, model.version, model.statistics.memory.sentence())

    async def note_end(self, model: Model) -> None:
        """Measure a version that is about to end, and store the result for :meth:`expected`."""
        if not is_ensemble(model.config):
            await self.measure([model])
            self._remember(model)

    def note_ended(self, model: Model) -> None:
        """Log the memory that a version has released; called after its workers have ended."""
        if not is_ensemble(model.config):
            LOG.info("'%s' version %d gave back %s", model.name, model.version, model.statistics.memory.sentence())

    async def _refresh(self) -> None:
        try:
            await self.measure()
        except Exception:
            LOG.exception("failed to measure the memory of the loaded models")
        finally:
            self._measured_at = monotonic()
            self._refreshing = None

    async def _estimate(self, files: ModelFiles, version: int, config: ModelConfig) -> ModelMemory:
        if is_ensemble(config) or is_remote(config) or implementation(config) not in BACKENDS:
            return ModelMemory()
        weights = await asyncio.to_thread(_weights, files, version, config)
        worker = self._worker_bytes(implementation(config))
        placements = list(placements_of(config))
        gpus = {placement.device: weights.size for placement in placements if placement.kind == "GPU"}
        # A configuration that is not complete yet may have no instance groups: assume one worker.
        workers = len(placements) or 1
        return ModelMemory(
            workers=workers * worker + (workers - len(gpus)) * weights.size, gpus=gpus, weights=weights.size
        )

    def _worker_bytes(self, backend: str) -> int:
        """Return the memory of a worker of a backend without weights: the median of loaded workers, or a constant.

        For Python models it is always the constant, because their workers have only the interpreter in common.
        """
        if backend == "python":
            return _WORKER_BYTES[backend]
        seen = []
        for model in self._table.loaded():
            memory, workers = model.statistics.memory, len(model.executor.processes)
            if implementation(model.config) == backend and workers and memory.workers:
                weights = 0 if memory.gpus else memory.weights * workers
                seen.append(max(0, memory.workers - weights) // workers)
        return median_low(seen) if seen else _WORKER_BYTES.get(backend, _OTHER_WORKER_BYTES)

    def _remember(self, model: Model) -> None:
        model_state = self._table.models.get(model.key)
        if model_state is not None:
            model_state.memory[model.version] = model.statistics.memory

    def _sum(self, free: FreeMemory) -> str:
        used = self.used()
        where = "the server's control group" if free.limited else "the machine"
        loaded = len(self._table.loaded())
        models = f", {loaded} loaded models use {mebibytes(used.host)}" if loaded else ""
        return f"{where} has {mebibytes(free.available)} left of {mebibytes(free.total)}{models}"


def _weights(files: ModelFiles, version: int, config: ModelConfig) -> WeightFiles:
    if is_remote(config):
        return WeightFiles()
    gpu = any(placement.kind == "GPU" for placement in placements_of(config))
    return find_weights(files.version_directory(version), parameters(config), gpu=gpu)


def _too_large(files: ModelFiles, version: int, weights: WeightFiles, left: str) -> ConchError:
    names = ", ".join(Path(file).name for file in weights.files[:3])
    more = f" and {len(weights.files) - 3} more" if len(weights.files) > 3 else ""
    return unavailable(
        f"model '{files.name}' version {version} does not fit into memory: its weights ({names}{more}) take "
        f"at least {mebibytes(weights.least)}, and {left}; unload other models, or start the server with "
        "--check-memory-on-load=false to try it anyway"
    )
