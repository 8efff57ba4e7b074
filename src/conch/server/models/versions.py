"""Swaps loaded versions in, and ends replaced and unloaded versions after their last requests.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from conch.server.concurrency import end_all
from conch.server.model import Model
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import UNLOADED, ModelState, ModelTable, State, VersionState
from conch.telemetry.metrics import Registry

LOG = logging.getLogger("conch")


class ServingVersions:
    """Changes which versions of the models in ``table`` serve, and registers their metrics in ``registry``.

    ``timeout`` limits the last requests of a version (s); 0 means no limit.
    """

    def __init__(self, table: ModelTable, registry: Registry, ledger: MemoryLedger, timeout: float = 0) -> None:
        self._table = table
        self._registry = registry
        self._ledger = ledger
        self._timeout = timeout
        self._ending: dict[asyncio.Task[None], Model] = {}
        self._removals: set[asyncio.Task[None]] = set()

    def swap(self, model_state: ModelState, models: Sequence[Model]) -> None:
        """Let ``models`` serve, and unload all other versions of the model."""
        new = {model.version: model for model in models}
        for version, version_state in list(model_state.versions.items()):
            if version not in new:
                if version_state.state is State.READY:
                    self.unload_version(version_state)
                else:
                    del model_state.versions[version]
        for version, model in sorted(new.items()):
            previous = model_state.versions[version].model
            model_state.versions[version] = VersionState(State.READY, "", model)
            if previous is model:
                continue
            if previous is not None:
                self.end(previous)
            self._registry.register(
                model.statistics,
                tags=dict(model.config.metric_tags),
                namespace=model.namespace,
                cached=model.cache is not None,
            )
        LOG.info("successfully loaded '%s'", model_state.name)

    def unload_model(self, model_state: ModelState) -> None:
        """Unload all versions of a model; returns while their last requests still run."""
        for version_state in model_state.versions.values():
            if version_state.state in (State.READY, State.LOADING):
                self.unload_version(version_state)
            elif version_state.state is State.UNAVAILABLE:
                version_state.reason = UNLOADED
        model_state.fingerprint = None
        self.remove_upload(model_state)

    def unload_version(self, version_state: VersionState) -> None:
        """Unload a version; returns while its last requests still run."""
        model = version_state.model
        if model is None:
            version_state.make_unavailable(UNLOADED)
            return
        version_state.state = State.UNLOADING
        self.end(model, version_state)

    def end(self, model: Model, version_state: VersionState | None = None) -> None:
        """End a version that gets no new requests; afterwards ``version_state``, if given, is unavailable."""
        model.executor.retire()
        task = asyncio.get_running_loop().create_task(self._end_when_idle(model, version_state))
        self._ending[task] = model
        task.add_done_callback(self._ending.pop)

    async def _end_when_idle(self, model: Model, version_state: VersionState | None) -> None:
        in_time = await model.finish(self._timeout or None)
        shown = f"'{model.key}' version {model.version}"
        await end_all(f"measure {shown} before its end", self._ledger.note_end(model))
        if not in_time:
            LOG.warning(
                "the last requests of '%s' version %d, which is unloaded, have taken %g s and fail "
                "(--unload-timeout-secs)", model.name, model.version, self._timeout,
            )  # fmt: skip
            await end_all(f"end {shown} by force", model.stop(0))
        self._registry.unregister(model.statistics, namespace=model.namespace)
        await end_all(f"end {shown}", model.stop())
        self._ledger.note_ended(model)
        if version_state is not None and version_state.model is model:
            version_state.make_unavailable(UNLOADED)
            LOG.info("successfully unloaded '%s' version %d", model.key, model.version)

    @property
    def ending(self) -> list[Model]:
        """Replaced and unloaded versions that have not ended."""
        return list(self._ending.values())

    async def wait(self, name: str) -> None:
        """Wait until the versions of a model that were replaced or unloaded before this call have ended."""
        ending = [task for task, model in self._ending.items() if model.key == name]
        if ending:
            await asyncio.wait(ending)

    async def finish(self, seconds: float) -> bool:
        """Wait until all replaced and unloaded versions have ended; after ``seconds``, end them and return False."""
        if not self._ending:
            return True
        _, pending = await asyncio.wait(list(self._ending), timeout=seconds)
        late = [self._ending[task] for task in pending if task in self._ending]
        await end_all("end a version by force", *(model.stop(0) for model in late))
        return not pending

    def remove_upload(self, model_state: ModelState) -> None:
        """Remove the files that a client sent for a model when no version loaded from them is running."""
        uploaded, model_state.uploaded = model_state.uploaded, None
        if uploaded is None:
            return

        async def remove() -> None:
            await self.wait(model_state.name)
            await asyncio.to_thread(uploaded.close)

        task = asyncio.get_running_loop().create_task(remove())
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def remove_uploads(self) -> None:
        """Remove all files that clients sent; call when no models are running."""
        for model_state in self._table.models.values():
            self.remove_upload(model_state)
        await end_all("remove uploaded files", *self._removals)
