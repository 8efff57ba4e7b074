"""Footprints of models: estimated from their files before a load, measured while they are loaded.

Used for loading on demand, on the event loop; disks are read in threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError
from conch.repository.errors import NotFoundError, NotUniqueError, PollError
from conch.repository.model_files import ModelFiles
from conch.repository.scan import ModelRepository
from conch.repository.versions import select_versions
from conch.server.model import Model
from conch.server.models.eviction.capacity import Capacity
from conch.server.models.eviction.vocabulary import Footprint, Footprints
from conch.server.models.memory import MemoryLedger
from conch.telemetry.memory import together


class LoadFootprints:
    """Determines the footprints of models in a repository; ``gpus`` are used to complete configurations."""

    def __init__(self, repository: ModelRepository, ledger: MemoryLedger, gpus: tuple[int, ...] = ()) -> None:
        self._repository = repository
        self._ledger = ledger
        self._gpus = gpus

    async def of(self, name: str) -> Footprints:
        """Return the footprints of a load of ``name``: of the model and, recursively, the models of its steps.

        Raises :class:`PollError` if the model does not exist or cannot be read, so that no other model is evicted for
        it. Other problems of a model are reported by its load.
        """
        footprints: dict[str, Footprint] = {}
        waiting = [name]
        while waiting:
            model = waiting.pop()
            if model in footprints:
                continue
            try:
                files = await self._repository.described(model)
                footprints[model] = await self._of_one(files)
            except (ConchError, OSError, ValueError) as error:
                if model == name and isinstance(error, PollError) and not isinstance(error, NotUniqueError):
                    raise
                if not isinstance(error, NotFoundError):
                    footprints[model] = Footprint(Capacity(models=1))
            else:
                waiting += footprints[model].members
        return footprints

    async def _of_one(self, files: ModelFiles) -> Footprint:
        members = _step_models(files.config)
        if members:
            return Footprint(Capacity(), members)
        config = files.completed(self._gpus)
        versions = select_versions(config, files.versions).versions
        memory = await self._ledger.expected(files, versions, config)
        return Footprint(Capacity(models=1, memory=memory.host))

    def measured(self, models: Sequence[Model]) -> Footprint:
        """Return the footprint of the loaded versions of one model."""
        members = frozenset[str]().union(*(_step_models(model.config) for model in models))
        if members:
            return Footprint(Capacity(), members)
        return Footprint(Capacity(models=1, memory=together(model.statistics.memory for model in models).host))

    async def remeasure(self) -> None:
        """Measure all loaded models."""
        await self._ledger.measure()


def _step_models(config: ModelConfig) -> frozenset[str]:
    """Return the names of the models in an ensemble's steps."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
