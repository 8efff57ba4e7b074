"""Loads, reloads and unloads models, and keeps the table of their states true.

Runs on the event loop; disks are read in threads.  A load makes everything anew, then swaps it in;
what it replaces serves until then and ends after its last request.  Loads of unrelated models go
on side by side; those of related ones wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from conch.config.schema import ModelConfig, is_ensemble
from conch.errors import ConchError, internal, invalid
from conch.repository.errors import NotUniqueError, PollError
from conch.repository.fingerprint import Fingerprint
from conch.repository.override import Override, UploadedModel, describe_override
from conch.repository.scan import ModelFiles, ModelRepository
from conch.repository.versions import missing_version_warning, select_versions
from conch.server.loading import Loader
from conch.server.model import Model
from conch.server.states import UNLOADED, ModelState, ModelTable, State, VersionState
from conch.telemetry.metrics import Registry

LOG = logging.getLogger("conch")


class Lifecycle:
    """The one writer of the model table."""

    def __init__(
        self,
        repository: ModelRepository,
        loader: Loader,
        table: ModelTable,
        registry: Registry,
        *,
        parallel_loads: int = 4,
        retries: int = 0,
    ) -> None:
        self._repository = repository
        self._loader = loader
        self._table = table
        self._registry = registry
        self._slots = asyncio.Semaphore(parallel_loads)
        self._retries = retries
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def load_all(self, names: Iterable[str]) -> dict[str, ConchError]:
        """Load several models; what failed, by name."""
        operation = _Load(self, wanted=frozenset(names))
        names = sorted(operation.wanted)
        results = await asyncio.gather(*(operation.load(name) for name in names), return_exceptions=True)
        failed: dict[str, ConchError] = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, ConchError):
                failed[name] = result
            elif isinstance(result, BaseException):
                raise result
        await self._revalidate(names)
        return failed

    async def load(self, name: str, override: Override | None = None) -> None:
        """Load or reload one model and, for an ensemble, the members that are not there yet.

        Raises the reason; what served before serves on.
        """
        async with self._related(name):
            await _Load(self, wanted=frozenset([name]), override=override).load(name)
            await self._revalidate([name])

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model; returns while its last requests still run.

        ``dependents`` are the members of an ensemble that nobody asked for by name and nobody else needs.
        """
        async with self._related(name):
            known = self._table.models.get(name)
            if known is None:
                return
            members = known.members
            known.wanted = False
            self._retire_all(known)
            await self._revalidate([name])
            if dependents:
                needed = {
                    member for one in self._table.models.values() if one.ready_versions() for member in one.members
                }
                for member in sorted(members - needed):
                    state = self._table.models.get(member)
                    if state is not None and not state.wanted:
                        self._retire_all(state)

    async def forget(self, name: str) -> None:
        """Unload a model whose directory is gone."""
        await self.unload(name)

    async def finish_retiring(self) -> None:
        """Wait until everything that was replaced or unloaded has ended."""
        while self._retiring:
            await asyncio.gather(*self._retiring)

    # Used by _Load.

    async def describe(self, name: str) -> ModelFiles:
        return await asyncio.to_thread(self._repository.describe, name)

    def configure(self, files: ModelFiles) -> ModelConfig:
        try:
            return self._loader.configure(files)
        except PollError:
            raise
        except ConchError as error:
            raise PollError.of(files.name, error) from error

    async def is_unchanged(self, known: ModelState) -> bool:
        """Whether a model serves just what its directory holds."""
        if known.overridden or known.fingerprint is None or not known.versions:
            return False
        if any(one.state is not State.READY for one in known.versions.values()):
            return False
        try:
            return await asyncio.to_thread(self._repository.fingerprint, known.name) == known.fingerprint
        except (ConchError, OSError):
            return False

    async def bring_up(
        self,
        known: ModelState,
        files: ModelFiles,
        config: ModelConfig,
        uploaded: UploadedModel | None,
        overridden: bool,
    ) -> None:
        """Load the versions that the policy selects, all or none, and swap them in."""
        selection = select_versions(config, files.versions)
        for warning in files.warnings:
            LOG.warning("%s", warning)
        for version in selection.missing:
            LOG.warning("%s", missing_version_warning(files.name, version))
        if not selection.versions:
            raise invalid(
                f"load failed for model '{files.name}': at least one version must be available "
                f"under the version policy of model '{files.name}'\n"
            )
        for version in selection.versions:
            one = known.versions.setdefault(version, VersionState(State.LOADING))
            if one.state is not State.READY:
                one.state, one.reason = State.LOADING, ""
        fingerprint = None
        if uploaded is None:
            with contextlib.suppress(ConchError, OSError):
                fingerprint = await asyncio.to_thread(self._repository.fingerprint, files.name)
        kept = {} if overridden else self._untouched(known, config, fingerprint)
        loaded = await asyncio.gather(
            *(self._load_version(files, version, config, kept.get(version)) for version in selection.versions),
            return_exceptions=True,
        )
        failed = {
            version: result
            for version, result in zip(selection.versions, loaded, strict=True)
            if isinstance(result, BaseException)
        }
        models = [result for result in loaded if isinstance(result, Model)]
        if failed:
            await asyncio.gather(*(model.stop() for model in models if model not in kept.values()))
            self._note_failure(known, selection.versions, failed)
            raise _load_failed(files.name, failed)
        self._swap(known, models)
        if known.uploaded is not None:
            known.uploaded.close()
        known.files, known.config, known.fingerprint = files, config, fingerprint
        known.uploaded, known.overridden, known.poll_reason = uploaded, overridden, ""

    def _untouched(self, known: ModelState, config: ModelConfig, fingerprint: Fingerprint | None) -> dict[int, Model]:
        """The versions that may run on, with other instances perhaps: nothing else of them has changed."""
        if known.overridden or known.config is None or known.fingerprint is None or fingerprint is None:
            return {}
        if is_ensemble(config) or _without_instances(known.config) != _without_instances(config):
            return {}
        return {
            model.version: model
            for model in known.models()
            if known.fingerprint.same_version(fingerprint, model.version)
        }

    async def _load_version(self, files: ModelFiles, version: int, config: ModelConfig, running: Model | None) -> Model:
        async with self._slots:
            if running is not None:
                await self._loader.rescale(running, files, config)
                return running
            for attempt in range(self._retries + 1):
                try:
                    if is_ensemble(config):
                        return self._loader.load_ensemble(files, version, config, self._members(config))
                    return await self._loader.load(files, version, config)
                except ConchError as error:
                    LOG.error("failed to load '%s' version %d: %s", files.name, version, error.status)
                    if attempt == self._retries:
                        raise
        raise AssertionError("unreachable")

    def _members(self, config: ModelConfig) -> Mapping[str, Model]:
        """The models of an ensemble's steps.  Raises INVALID_ARG for one that does not serve."""
        members: dict[str, Model] = {}
        for step in config.ensemble_scheduling.step:
            known = self._table.models.get(step.model_name)
            if known is None:
                raise invalid(
                    f"ensemble {config.name} contains models that are not available or ambiguous: {step.model_name}"
                )
            ready = known.ready_versions()
            if not ready:
                reasons = [one.reason for one in known.versions.values() if one.reason]
                raise invalid(
                    f"ensemble '{config.name}' depends on '{step.model_name}' which has no loaded version. "
                    f"Model '{step.model_name}' loading failed with error: {'; '.join(reasons) or known.poll_reason}"
                )
            if step.model_version != -1 and step.model_version not in ready:
                raise invalid(
                    f"ensemble '{config.name}' depends on '{step.model_name}' "
                    f"whose required version {step.model_version} is not loaded."
                )
            members[step.model_name] = self._table.find(step.model_name, step.model_version)
        return members

    def _note_failure(self, known: ModelState, versions: Sequence[int], failed: Mapping[int, BaseException]) -> None:
        """Versions that serve go on; the others say why they do not."""
        for version in versions:
            one = known.versions[version]
            if one.state is State.READY:
                continue
            error = failed.get(version)
            if error is None:
                del known.versions[version]
            else:
                one.state = State.UNAVAILABLE
                one.reason = error.status if isinstance(error, ConchError) else repr(error)

    def _swap(self, known: ModelState, models: Sequence[Model]) -> None:
        new = {model.version: model for model in models}
        for version, one in list(known.versions.items()):
            if version not in new:
                if one.state is State.READY:
                    self._retire(one, version)
                else:
                    del known.versions[version]
        for version, model in sorted(new.items()):
            previous = known.versions[version].model
            known.versions[version] = VersionState(State.READY, "", model)
            if previous is model:
                continue
            if previous is not None:
                self._end(previous, None)
            self._registry.register(model.statistics, tags=dict(model.config.metric_tags))
        LOG.info("successfully loaded '%s'", known.name)

    def _retire_all(self, known: ModelState) -> None:
        for version, one in known.versions.items():
            if one.state in (State.READY, State.LOADING):
                self._retire(one, version)
            elif one.state is State.UNAVAILABLE:
                one.reason = UNLOADED
        known.fingerprint = None

    def _retire(self, one: VersionState, version: int) -> None:
        model = one.model
        if model is None:
            one.state, one.reason = State.UNAVAILABLE, UNLOADED
            return
        one.state = State.UNLOADING
        self._end(model, one)

    def _end(self, model: Model, one: VersionState | None) -> None:
        task = asyncio.get_running_loop().create_task(self._end_when_idle(model, one))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end_when_idle(self, model: Model, one: VersionState | None) -> None:
        await model.finish()
        self._registry.unregister(model.statistics)
        await model.stop()
        if one is not None and one.model is model:
            one.state, one.reason, one.model = State.UNAVAILABLE, UNLOADED, None
            LOG.info("successfully unloaded '%s' version %d", model.name, model.version)

    async def _revalidate(self, changed: Iterable[str]) -> None:
        """Load ensembles again whose members have changed; those that do not fit any more stop serving."""
        names = set(changed)
        for ensemble in list(self._table.models.values()):
            if ensemble.name in names or not ensemble.members & names or not ensemble.models():
                continue
            for version, one in list(ensemble.versions.items()):
                if one.state is not State.READY or ensemble.files is None or one.model is None:
                    continue
                try:
                    self._loader.check_ensemble(one.model.config, self._members(one.model.config))
                except ConchError as error:
                    LOG.error("failed to load '%s' version %d: %s", ensemble.name, version, error.status)
                    self._end(one.model, None)
                    one.state, one.reason, one.model = State.UNAVAILABLE, error.status, None
                    await self._revalidate([ensemble.name])

    @contextlib.asynccontextmanager
    async def _related(self, name: str) -> AsyncIterator[None]:
        """Hold the locks of a model, its members and the ensembles that use it, always in the same order."""
        names = {name}
        grown = True
        while grown:
            before = len(names)
            for one in self._table.models.values():
                if one.name in names or one.members & names:
                    names |= {one.name} | one.members
            grown = len(names) > before
        async with contextlib.AsyncExitStack() as stack:
            for related in sorted(names):
                await stack.enter_async_context(self._locks.setdefault(related, asyncio.Lock()))
            yield


class _Load:
    """One load and all that it needs; each model is loaded once, members before their ensembles."""

    def __init__(self, lifecycle: Lifecycle, wanted: frozenset[str], override: Override | None = None) -> None:
        self.wanted = wanted
        self._lifecycle = lifecycle
        self._override = override
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._needs: dict[str, set[str]] = {}

    async def load(self, name: str) -> None:
        """Load a model once, however many ask for it."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.get_running_loop().create_task(self._load(name))
        await asyncio.shield(task)

    async def _load(self, name: str) -> None:
        lifecycle = self._lifecycle
        table = lifecycle._table
        override = self._override if name in self.wanted else None
        known = table.models.get(name)
        if known is not None and not override and not known.members and await lifecycle.is_unchanged(known):
            known.wanted = known.wanted or name in self.wanted
            return
        uploaded: UploadedModel | None = None
        try:
            files, uploaded = await self._files(name, override)
            config = lifecycle.configure(files)
            await self._load_members(name, config)
            if known is not None and not override and await lifecycle.is_unchanged(known):
                known.wanted = known.wanted or name in self.wanted
                return
            known = table.models.setdefault(name, ModelState(name))
            known.wanted = known.wanted or name in self.wanted
            if not known.config:
                known.config = config
            await lifecycle.bring_up(known, files, config, uploaded, overridden=bool(override))
        except BaseException as error:
            if uploaded is not None:
                uploaded.close()
            if isinstance(error, PollError):
                LOG.error("%s", error.log)
                if isinstance(error, NotUniqueError) and known is None:
                    table.models[name] = ModelState(name, poll_reason=error.index_reason)
            raise

    async def _files(self, name: str, override: Override | None) -> tuple[ModelFiles, UploadedModel | None]:
        if override is None or not override:
            return await self._lifecycle.describe(name), None
        if override.files:
            uploaded = await asyncio.to_thread(UploadedModel, name, override.files)
            try:
                return await asyncio.to_thread(describe_override, name, uploaded.directory, override.config), uploaded
            except BaseException:
                uploaded.close()
                raise
        directory = await asyncio.to_thread(self._lifecycle._repository.directory, name)
        return await asyncio.to_thread(describe_override, name, directory, override.config), None

    async def _load_members(self, name: str, config: ModelConfig) -> None:
        members = {step.model_name for step in config.ensemble_scheduling.step}
        self._needs[name] = members
        cycle = self._cycle(name, [name])
        if cycle:
            raise invalid(f"circular dependency between ensembles: {' -> '.join(cycle)}")
        # What does not load is reported by the ensemble's own validation.
        await asyncio.gather(*(self.load(member) for member in sorted(members)), return_exceptions=True)

    def _cycle(self, name: str, path: list[str]) -> list[str]:
        for member in self._needs.get(name, ()):
            if member == path[0]:
                return [*path, member]
            if member not in path and (found := self._cycle(member, [*path, member])):
                return found
        return []


def _without_instances(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("instance_group")
    rest.ClearField("version_policy")
    return rest


def _load_failed(name: str, failed: Mapping[int, BaseException]) -> ConchError:
    reasons = []
    for version, error in sorted(failed.items()):
        known = error if isinstance(error, ConchError) else internal(repr(error))
        reasons.append(f"version {version} is at UNAVAILABLE state: {known.status};")
    return invalid(f"load failed for model '{name}': " + " ".join(reasons) + "\n")
