"""What loading a model takes: estimated from its files before, measured when it is loaded.

Used by load on demand, on the event loop; disks are read in threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.config.schema import ModelConfig
from conch.errors import ConchError
from conch.repository.errors import NotFoundError
from conch.repository.model_files import ModelFiles
from conch.repository.scan import ModelRepository
from conch.repository.versions import select_versions
from conch.server.model import Model
from conch.server.models.eviction.capacity import Capacity
from conch.server.models.eviction.vocabulary import Footprint, Footprints
from conch.server.models.memory import MemoryLedger
from conch.telemetry.memory import together


class LoadFootprints:
    """Tells what models of a repository take; ``gpus`` are those that their configurations may be completed with."""

    def __init__(self, repository: ModelRepository, ledger: MemoryLedger, gpus: tuple[int, ...] = ()) -> None:
        self._repository = repository
        self._ledger = ledger
        self._gpus = gpus

    async def of(self, name: str) -> Footprints:
        """What a load of ``name`` brings: the model and all members.  Raises :class:`NotFoundError` for no model.

        Whatever else is wrong with a model is left to its load to say.
        """
        footprints: dict[str, Footprint] = {}
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one in footprints:
                continue
            try:
                files = await self._repository.described(one)
                footprints[one] = await self._of_one(files)
            except NotFoundError:
                if one == name:
                    raise
            except (ConchError, OSError, ValueError):
                footprints[one] = Footprint(Capacity(models=1))
            else:
                waiting += footprints[one].members
        return footprints

    async def _of_one(self, files: ModelFiles) -> Footprint:
        members = _members(files.config)
        if members:
            return Footprint(Capacity(), members)
        config = files.completed(self._gpus)
        versions = select_versions(config, files.versions).versions
        memory = await self._ledger.expected(files, versions, config)
        return Footprint(Capacity(models=1, memory=memory.host))

    def measured(self, models: Sequence[Model]) -> Footprint:
        """What the loaded versions of one model take."""
        members = frozenset[str]().union(*(_members(model.config) for model in models))
        if members:
            return Footprint(Capacity(), members)
        return Footprint(Capacity(models=1, memory=together(model.statistics.memory for model in models).host))

    async def measure_again(self) -> None:
        """Measure all models that serve."""
        await self._ledger.measure()


def _members(config: ModelConfig) -> frozenset[str]:
    """The models that the steps of an ensemble name."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
