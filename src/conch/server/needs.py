"""What loading a model takes: estimated from its files before, measured when it is loaded.

Used by load on demand; disks are read in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from conch.config.schema import ModelConfig
from conch.errors import ConchError
from conch.repository.errors import NotFoundError
from conch.repository.scan import ModelRepository
from conch.schedulers.residency.room import Room
from conch.schedulers.residency.vocabulary import Need, Needs
from conch.server.model import Model


class LoadNeeds:
    """Tells what models of a repository take."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    async def of(self, name: str) -> Needs:
        """What a load of ``name`` brings: the model and all members.  Raises :class:`NotFoundError` for no model.

        Whatever else is wrong with a model is left to its load to say.
        """
        needs: dict[str, Need] = {}
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one in needs:
                continue
            try:
                files = await asyncio.to_thread(self._repository.describe, one)
            except NotFoundError:
                if one == name:
                    raise
                continue
            except ConchError:
                needs[one] = Need(Room(models=1))
                continue
            members = _members(files.config)
            needs[one] = Need(Room(models=0 if members else 1), members)
            waiting += members
        return needs

    def measured(self, models: Iterable[Model]) -> Need:
        """What the loaded versions of one model take."""
        members: frozenset[str] = frozenset()
        room = Room()
        for model in models:
            own = _members(model.config)
            members |= own
            room = Room(max(room.models, 0 if own else 1), room.memory)
        return Need(room, members)


def _members(config: ModelConfig) -> frozenset[str]:
    """The models that the steps of an ensemble name."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
