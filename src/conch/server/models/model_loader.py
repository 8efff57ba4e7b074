"""Loads a model, from its configuration to the swap of its versions.

The steps of a load, from :meth:`ModelLoader.load_model` downwards: read the configuration, load the models of an
ensemble's steps, wait for a load slot, check the memory, start and warm up the workers
(``version_loader.py``), swap the new versions in, and unload the old ones after their last requests (``versions.py``).
A load that fails or is cancelled ends all workers that it has started; the previous versions continue to serve.

Called by the lifecycle, in one task per load; runs on the event loop, and reads disks in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from conch.config.remote import is_remote
from conch.config.schema import ModelConfig, is_ensemble, with_placement, without_placement
from conch.config.validate_ensemble import circular_dependency, cycle_of
from conch.core.errors import Code, ConchError, internal, invalid
from conch.repository.errors import NotFoundError, NotUniqueError, PollError, without_directories
from conch.repository.fingerprint import Fingerprint, take_external
from conch.repository.model_files import ModelFiles
from conch.repository.override import (
    Override,
    UploadedModel,
    check_same_code,
    describe_override,
    needs_no_directory,
    read_override,
)
from conch.repository.scan import ModelRepository
from conch.repository.versions import missing_version_warning, select_versions
from conch.server.concurrency import end_all, gather_all
from conch.server.model import Model
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import ModelState, ModelTable, State, VersionState, at_state
from conch.server.models.version_loader import VersionLoader
from conch.server.models.versions import ServingVersions

LOG = logging.getLogger("conch")

#: Loads the models with these keys; returns the errors of failed loads by key.
LoadModels = Callable[[Iterable[str]], Awaitable[Mapping[str, BaseException]]]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load the models ``names`` and the models of their steps.

    ``override`` replaces the files of the models in ``names``. ``by_model``: a model requested it, which may itself be
    loading and hold the last load slot.
    """

    names: frozenset[str] = frozenset()
    override: Override | None = None
    by_model: bool = False


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """The files and the configuration that a model is loaded from.

    ``steps`` maps the model names in an ensemble's steps to their keys. ``overridden``: a client sent the configuration
    or the files, which are then ``uploaded``.
    """

    files: ModelFiles
    config: ModelConfig
    steps: Mapping[str, str]
    overridden: bool = False
    uploaded: UploadedModel | None = None


class _CircularDependencyError(ConchError):
    """Failure to load an ensemble that contains itself; ``cycle`` has the ensembles that contain each other."""

    def __init__(self, name: str, cycle: tuple[str, ...]) -> None:
        self.cycle = cycle
        self.problem = circular_dependency(name, cycle)
        super().__init__(f"load failed for model '{name}': {self.problem.message}\n", self.problem.code)


@dataclass(slots=True)
class ModelLoader:
    """Loads the models of ``repository``; ``version_loader`` makes their versions, which ``versions`` swaps in.

    ``load_slots`` limits how many versions load at the same time, because they compete for memory and cores.
    ``retries`` is the number of further attempts to start a version.
    """

    repository: ModelRepository
    version_loader: VersionLoader
    table: ModelTable
    versions: ServingVersions
    ledger: MemoryLedger
    load_slots: asyncio.Semaphore
    retries: int = 0
    #: Keys of the models in the steps of ensembles that are being loaded.
    loading_steps: dict[str, set[str]] = field(default_factory=dict)

    async def load_model(self, name: str, request: LoadRequest, load_models: LoadModels) -> None:
        """Load or reload a model, unless it serves and is unchanged; the caller holds its lock.

        ``load_models`` loads the models of an ensemble's steps.
        """
        override = request.override if name in request.names else None
        uploaded: UploadedModel | None = None
        model_state = self.table.models.get(name)
        try:
            if model_state is not None:
                model_state.wanted = model_state.wanted or name in request.names
                if not override and not model_state.step_keys and await self._is_unchanged(model_state, request):
                    return
            files, uploaded = await self._read_files(name, override)
            config = await self._read_configuration(files, override, model_state)
            steps = await self._load_step_models(name, config, load_models)
            if model_state is None:
                model_state = ModelState(name, config=config, wanted=name in request.names, steps=steps)
                self.table.models[name] = model_state
            elif not override and await self._is_unchanged(model_state, request):
                return
            definition = ModelDefinition(files, config, steps, bool(override), uploaded)
            await self._replace_versions(model_state, definition, request.by_model)
        except BaseException as error:
            if uploaded is not None:
                await asyncio.to_thread(uploaded.close)
            if isinstance(error, PollError):
                LOG.error("%s", error.message)
                if isinstance(error, NotUniqueError) and model_state is None:
                    self.table.models[name] = ModelState(name, poll_reason=error.index_reason)
            raise
        finally:
            self.loading_steps.pop(name, None)

    async def _is_unchanged(self, model_state: ModelState, request: LoadRequest) -> bool:
        """Whether all versions of a model serve and their files have not changed since they were loaded.

        An override counts as a change if the model is now loaded by name, but not if it is loaded as a step of an
        ensemble.
        """
        if not model_state.versions or (model_state.overridden and model_state.name in request.names):
            return False
        if any(version_state.state is not State.READY for version_state in model_state.versions.values()):
            return False
        if model_state.fingerprint is None and model_state.uploaded is None:
            return False
        external = [model.external for model in model_state.models()]

        def unchanged() -> bool:
            fingerprint = model_state.fingerprint
            if fingerprint is not None and self.repository.fingerprint(model_state.name) != fingerprint:
                return False
            return all(take_external(files) == files for files in external)

        try:
            return await self.repository.in_thread(unchanged)
        except (ConchError, OSError):
            return False

    async def _read_files(self, name: str, override: Override | None) -> tuple[ModelFiles, UploadedModel | None]:
        """Read the files of a model from the repository, or store those that a client sent."""
        if not override:
            return await self.repository.described(name), None
        backends, naming = self.repository.backends, self.repository.naming
        plain, namespace = naming.name(name), naming.namespace(name)
        needs_directory = bool(override.files) or await self.repository.in_thread(
            partial(self._has_no_directory, name, override)
        )
        if needs_directory:
            uploaded = await asyncio.to_thread(UploadedModel, plain, override.files)
            try:
                return await asyncio.to_thread(
                    describe_override, plain, uploaded.directory, override.config, backends, namespace
                ), uploaded
            except BaseException:
                await asyncio.to_thread(uploaded.close)
                raise
        written = await asyncio.to_thread(read_override, plain, override.config)
        return await self.repository.described(name, written), None

    def _has_no_directory(self, name: str, override: Override) -> bool:
        """Whether the model of a load is in no repository and need not be; blocking."""
        if not needs_no_directory(override):
            return False
        try:
            self.repository.check_unique(name)
        except NotFoundError:
            return True
        return False

    async def _read_configuration(
        self, files: ModelFiles, override: Override | None, model_state: ModelState | None
    ) -> ModelConfig:
        """Return the configuration of a model. Raises INVALID_ARG if a client's selects code that is not allowed."""
        config = self._configure(files)
        if override and not override.of_any_code:
            known = [self._configure(await self.repository.described(files.key))]
            if model_state is not None:
                known += [model_state.config] if model_state.config else []
                known += [model.config for model in model_state.models()]
            check_same_code(config, known)
        return config

    def _configure(self, files: ModelFiles) -> ModelConfig:
        try:
            return self.version_loader.configure(files)
        except PollError:
            raise
        except ConchError as error:
            raise PollError.of(files.name, error) from error

    async def _load_step_models(self, name: str, config: ModelConfig, load_models: LoadModels) -> dict[str, str]:
        """Load the models in an ensemble's steps; return their keys by name.

        Raises INVALID_ARG if the ensemble does not fit them.
        """
        if not is_ensemble(config):
            return {}
        steps = await self.repository.in_thread(partial(self.repository.step_keys, config, name))
        self.loading_steps[name] = set(steps.values())
        cycle = cycle_of(name, self.loading_steps)
        if not cycle:
            # The check of the ensemble reports failed loads.
            failed = await load_models(set(steps.values()))
            cycles = (failure.cycle for failure in failed.values() if isinstance(failure, _CircularDependencyError))
            cycle = next((cycle for cycle in cycles if name in cycle), ())
        if cycle:
            circular = _CircularDependencyError(name, cycle)
            LOG.error("%s", circular.problem.status)
            raise circular
        try:
            self.version_loader.check_ensemble(config, steps)
        except ConchError as error:
            LOG.error("%s", error.status)
            message = f"load failed for model '{config.name}': {error.message}\n"
            raise ConchError(message, Code.INVALID_ARG, public=without_directories(message)) from error
        return steps

    async def _replace_versions(self, model_state: ModelState, definition: ModelDefinition, by_model: bool) -> None:
        """Load the versions that the policy selects, all or none, and swap them in."""
        files = definition.files
        versions = _select_versions(model_state, files, definition.config)
        kept: dict[int, Model] = {}
        rescaled = _rescaled(model_state, definition.config)
        if rescaled is not None:
            untouched = await self._untouched(model_state, files.fingerprint)
            kept = {model.version: model for model in untouched if self.version_loader.can_rescale(model, rescaled)}
            definition = replace(definition, config=rescaled) if kept else definition
        models = await self._load_versions(model_state, versions, definition, kept, by_model)
        self.versions.swap(model_state, models)
        self.versions.remove_upload(model_state)
        model_state.config, model_state.steps = definition.config, definition.steps
        model_state.uploaded, model_state.overridden = definition.uploaded, definition.overridden
        model_state.fingerprint = files.fingerprint
        model_state.poll_reason = model_state.version_reason = ""
        self.table.on_ready()

    async def _untouched(self, model_state: ModelState, fingerprint: Fingerprint | None) -> list[Model]:
        """Return the loaded versions with unchanged files."""
        known = model_state.fingerprint
        if known is None or fingerprint is None:
            return []
        models = [model for model in model_state.models() if known.same_version(fingerprint, model.version)]
        paths = {path for model in models for path in model.external}
        now = await self.repository.in_thread(partial(take_external, paths))
        return [model for model in models if all(now[path] == stamps for path, stamps in model.external.items())]

    async def _load_versions(
        self,
        model_state: ModelState,
        versions: Sequence[int],
        definition: ModelDefinition,
        kept: Mapping[int, Model],
        by_model: bool,
    ) -> list[Model]:
        """Load versions concurrently, and change the instances of those in ``kept``.

        If one fails, ends those that it has started, records the errors and raises them as INVALID_ARG.
        """

        async def end(model: Model) -> None:
            if model not in kept.values():
                await model.stop(0)

        loads = (self._load_version(definition, version, kept.get(version), by_model) for version in versions)
        ended = await gather_all(loads, end)
        results = dict(zip(versions, ended, strict=True))
        models = [result for result in results.values() if isinstance(result, Model)]
        name = model_state.name
        failed = {
            version: _as_error(name, version, result)
            for version, result in results.items()
            if not isinstance(result, Model)
        }
        if failed:
            started = [model for model in models if model not in kept.values()]
            await end_all(f"end versions of '{name}'", *(model.stop() for model in started))
            _record_failure(model_state, versions, failed)
            raise _load_failed(definition.files.name, failed)
        return models

    async def _load_version(
        self, definition: ModelDefinition, version: int, running: Model | None, by_model: bool
    ) -> Model:
        """Load a version, or change the instances of a ``running`` one."""
        files, config = definition.files, definition.config
        async with self._load_slot(by_model) as release_slot:
            if running is not None:
                await self.version_loader.rescale(running, files, config, release_slot)
                return running
            await self.ledger.check(files, version, config)
            model = await self._start_version(definition, version, release_slot)
            try:
                await self.ledger.note_load(model, files)
            except BaseException:
                await model.stop(0)
                raise
            return model

    @asynccontextmanager
    async def _load_slot(self, by_model: bool) -> AsyncIterator[Callable[[], None]]:
        """Hold a load slot during the block; the yielded function releases it earlier, so that other models can load.

        A load that a model requests needs none: that model may itself be loading, and hold the last one.
        """
        with ExitStack() as slot:
            if not by_model:
                await self.load_slots.acquire()
                slot.callback(self.load_slots.release)
            yield slot.close

    async def _start_version(self, definition: ModelDefinition, version: int, on_stalled: Callable[[], None]) -> Model:
        """Start a version; retries as often as the settings allow."""
        files, config, steps = definition.files, definition.config, definition.steps
        retries = self.retries
        while True:
            try:
                return await self.version_loader.load(files, version, config, steps, on_stalled)
            except ConchError as error:
                LOG.error("failed to load '%s' version %d: %s", files.key, version, error.status)
                if not retries:
                    raise
                retries -= 1

    async def restore_ensemble(self, ensemble: ModelState, by_model: bool) -> bool:
        """Load an ensemble again if the models of its steps serve again; returns whether it serves.

        An ensemble with files from a client is skipped: its client must load it again.
        """
        if ensemble.config is None or ensemble.uploaded is not None:
            return False
        try:
            self.table.step_models(ensemble.config, ensemble.steps)
        except ConchError:
            return False
        try:
            files = await self.repository.described(ensemble.name)
            config = ensemble.config if ensemble.overridden else self.version_loader.configure(files)
            steps = await self.repository.in_thread(partial(self.repository.step_keys, config, ensemble.name))
            definition = ModelDefinition(files, config, steps, ensemble.overridden)
            await self._replace_versions(ensemble, definition, by_model)
        except ConchError as error:
            LOG.error(
                "failed to reload ensemble '%s' although the models of its steps are ready again: %s",
                ensemble.name,
                error.status,
            )
            return False
        return True


def _select_versions(model_state: ModelState, files: ModelFiles, config: ModelConfig) -> Sequence[int]:
    """Return the versions that the policy selects, and mark them as loading unless they serve; logs warnings.

    Raises INVALID_ARG if it selects none.
    """
    selection = select_versions(config, files.versions)
    for warning in files.warnings:
        LOG.warning("%s", warning)
    for version in selection.missing:
        LOG.warning("%s", missing_version_warning(files.name, version))
    if not selection.versions:
        reason = f"at least one version must be available under the version policy of model '{files.name}'"
        LOG.error("failed to load model '%s': %s", files.name, reason)
        model_state.version_reason = reason
        raise invalid(f"load failed for model '{files.name}': {reason}\n")
    for version in selection.versions:
        version_state = model_state.versions.setdefault(version, VersionState(State.LOADING))
        if version_state.state is not State.READY:
            version_state.state, version_state.reason = State.LOADING, ""
    return selection.versions


def _rescaled(model_state: ModelState, config: ModelConfig) -> ModelConfig | None:
    """The running configuration with the instances and version policy of ``config``; None if other fields differ.

    ``config`` may come from a client that sends back a configuration completed by a backend.
    """
    written = model_state.config
    if written is None or is_ensemble(config) or is_remote(config):
        return None
    rest = without_placement(config)
    if without_placement(written) == rest:
        return config
    models = model_state.models()
    if models and all(without_placement(model.config) == rest for model in models):
        return with_placement(written, config)
    return None


def _as_error(name: str, version: int, error: BaseException) -> ConchError:
    """The error of a failed load; an exception other than ConchError is logged and becomes INTERNAL."""
    if isinstance(error, ConchError):
        return error
    LOG.error("failed to load '%s' version %d", name, version, exc_info=error)
    return internal(repr(error))


def _record_failure(model_state: ModelState, versions: Sequence[int], failed: Mapping[int, ConchError]) -> None:
    """Record the errors of failed versions; versions that serve are left as they are."""
    for version in versions:
        version_state = model_state.versions[version]
        if version_state.state is State.READY:
            continue
        error = failed.get(version)
        if error is None:
            del model_state.versions[version]
        else:
            version_state.state = State.UNAVAILABLE
            version_state.reason = error.public_status


def _load_failed(name: str, failed: Mapping[int, ConchError]) -> ConchError:
    def message(reasons: Mapping[int, str]) -> str:
        statuses = [at_state(version, State.UNAVAILABLE, reason) for version, reason in sorted(reasons.items())]
        return f"load failed for model '{name}': {' '.join(statuses)}\n"

    public = message({version: error.public_status for version, error in failed.items()})
    return ConchError(
        message({version: error.status for version, error in failed.items()}),
        Code.INVALID_ARG,
        public=without_directories(public),
    )
