"""The identity of a model version, and its scope in the response cache.

Responses of an ensemble depend on the models of its steps: when one is reloaded, the ensemble gets a new scope. Used by
the loader; scopes are looked up on the event loop for each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from conch.config.schema import ModelConfig
from conch.core.errors import ConchError
from conch.repository.fingerprint import Dependency, Identity, identity_of, joint_identity
from conch.repository.model_files import ModelFiles
from conch.server.caching.cache import CacheScope, NoEntries, ResponseCache
from conch.server.execution.dispatch import Dispatcher
from conch.server.model import Model

LOG = logging.getLogger("conch")

#: Names of the runtime facts that responses depend on.
_DECISIVE: Final = frozenset({"engine", "precision", "variant", "by_shape", "providers"})


class EnsembleCacheScope:
    """Returns the current cache scope of a version; ``make`` creates it for the models that ``sources`` returns.

    When a model of a step is replaced, the scope ends: responses that used the old model are not cached, however late
    they are.
    """

    def __init__(self, sources: Callable[[], Sequence[Model]], make: Callable[[Sequence[Model]], CacheScope]) -> None:
        self._sources = sources
        self._make = make
        models = sources()
        self._scope = make(models)
        self._serials = _serials(models)

    def __call__(self) -> CacheScope:
        try:
            models = self._sources()
        except ConchError:  # a step's model is not loaded; the executor reports it
            return self._scope
        serials = _serials(models)
        if serials != self._serials:
            self._scope.forget()
            self._scope, self._serials = self._make(models), serials
        return self._scope


def _serials(models: Sequence[Model]) -> list[int]:
    return [model.serial for model in models]


def entries_of(
    cache: ResponseCache, key: str, version: int, identity: Identity, sources: Sequence[Model]
) -> CacheScope:
    """Return the cache scope of the version with this ``key``, whose responses also depend on ``sources``.

    If the cache outlives the version and the identity is incomplete, logs a warning and returns an empty scope.
    """
    joint = joint_identity(identity, ((model.name, model.identity) for model in sources))
    if not joint.unknown or not cache.lasting:
        return cache.scope(key, version, joint.digest)
    LOG.warning(
        "responses of '%s' version %d are not kept in the shared response cache, as they depend on more than it can "
        "tell: %s",
        key, version, joint.unknown,
    )  # fmt: skip
    return NoEntries()


async def version_identity(
    files: ModelFiles,
    version: int,
    config: ModelConfig,
    load_time: int,
    settings: Mapping[str, str],
    workers: Dispatcher | None,
) -> Identity:
    """Compute the identity of a version from ``config`` without its placement and the ``settings`` of its backend.

    ``load_time`` is the start of its load (ns since the epoch), ``workers`` run the loaded version.
    """
    facts, dependencies = dict(settings), list[Dependency]()
    if workers is not None:
        facts |= {name: fact for name, fact in workers.runtime_facts.items() if name in _DECISIVE}
        dependencies = [Dependency(*pair) for process in workers.processes for pair in process.dependencies]
    directories = [files.directory, *([files.backend_directory] if files.backend_directory else [])]
    return await asyncio.to_thread(
        identity_of, directories, version, config, began=load_time, facts=facts, dependencies=dependencies
    )
