"""Starts new versions of a model, swaps them in, and ends the replaced versions after their last request.

Owned by the lifecycle, which holds the locks; runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial

from conch.config.remote import is_remote
from conch.config.schema import ModelConfig, is_ensemble, with_placement, without_placement
from conch.config.validate_ensemble import step_model_not_loaded, step_model_not_valid, version_problem
from conch.core.errors import Code, ConchError, internal, invalid
from conch.repository.errors import without_directories
from conch.repository.fingerprint import Fingerprint, take_external
from conch.repository.model_files import ModelFiles
from conch.repository.override import UploadedModel
from conch.repository.scan import ModelRepository
from conch.repository.versions import missing_version_warning, select_versions
from conch.server.concurrency import end_all, gather_all
from conch.server.execution.load_slots import LoadSlots, no_load_slot
from conch.server.model import Model
from conch.server.models.loading import Loader
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import UNLOADED, ModelState, ModelTable, State, VersionState, at_state
from conch.telemetry.metrics import Registry

LOG = logging.getLogger("conch")

#: Whether a model requested this load. That model may itself be loading: waiting for its load slot would deadlock.
asked_by_model: ContextVar[bool] = ContextVar("asked_by_model", default=False)


class Rollout:
    """Changes the versions of models that serve.

    ``parallel_loads`` limits concurrent loads. ``retries`` is the number of further attempts after a failed load.
    ``unload_seconds`` is the timeout for the last requests of a version that is replaced or unloaded; 0 means none.
    """

    def __init__(
        self,
        repository: ModelRepository,
        loader: Loader,
        table: ModelTable,
        registry: Registry,
        *,
        parallel_loads: int = 4,
        retries: int = 0,
        ledger: MemoryLedger | None = None,
        unload_seconds: float = 0,
    ) -> None:
        self._repository = repository
        self._loader = loader
        self._table = table
        self._registry = registry
        self._load_slots = LoadSlots(parallel_loads)
        self._retries = retries
        self._ledger = ledger or MemoryLedger(table)
        self._unload_seconds = unload_seconds
        self._retiring: dict[asyncio.Task[None], Model] = {}
        self._disposals: set[asyncio.Task[None]] = set()

    async def bring_up(
        self,
        model_state: ModelState,
        files: ModelFiles,
        config: ModelConfig,
        uploaded: UploadedModel | None,
        overridden: bool,
        steps: Mapping[str, str],
    ) -> None:
        """Load the versions that the policy selects, all or none, and swap them in.

        ``steps`` maps the model names in an ensemble's steps to their keys.
        """
        versions = _selected_versions(files, config)
        if not versions:
            reason = f"at least one version must be available under the version policy of model '{files.name}'"
            LOG.error("failed to load model '%s': %s", files.name, reason)
            model_state.version_reason = reason
            raise invalid(f"load failed for model '{files.name}': {reason}\n")
        for version in versions:
            version_state = model_state.versions.setdefault(version, VersionState(State.LOADING))
            if version_state.state is not State.READY:
                version_state.state, version_state.reason = State.LOADING, ""
        fingerprint = files.fingerprint
        if uploaded is None and fingerprint is None:
            with contextlib.suppress(ConchError, OSError):
                fingerprint = await self._repository.aside(partial(self._repository.fingerprint, files.key))
        regrouped = _regrouped(model_state, config)
        kept = {}
        if regrouped is not None:
            untouched = await self._untouched(model_state, fingerprint)
            kept = {
                version: model for version, model in untouched.items() if self._loader.can_rescale(model, regrouped)
            }
        config = regrouped if kept and regrouped is not None else config
        loaded = await gather_all(
            (self._load_version(files, version, config, steps, kept.get(version)) for version in versions),
            lambda model: asyncio.sleep(0) if model in kept.values() else model.stop(0),
        )
        models = [result for result in loaded if isinstance(result, Model)]
        failed = {
            version: _as_error(files.name, version, result)
            for version, result in zip(versions, loaded, strict=True)
            if not isinstance(result, Model)
        }
        if failed:
            started = [model for model in models if model not in kept.values()]
            await end_all(f"end versions of '{files.name}'", *(model.stop() for model in started))
            self._note_failure(model_state, versions, failed)
            raise _load_failed(files.name, failed)
        self._swap(model_state, models)
        self._dispose(model_state)
        model_state.config, model_state.steps, model_state.fingerprint = config, steps, fingerprint
        model_state.uploaded, model_state.overridden, model_state.poll_reason = uploaded, overridden, ""
        model_state.version_reason = ""
        self._table.on_ready()

    async def restore(self, ensemble: ModelState) -> bool:
        """Load an ensemble again if the models of its steps are loaded again; returns whether it serves.

        An ensemble with files from a client is skipped: its client must load it again.
        """
        if ensemble.config is None or ensemble.uploaded is not None:
            return False
        try:
            self.step_models(ensemble.config, ensemble.steps)
        except ConchError:
            return False
        try:
            files = await self._repository.described(ensemble.name)
            config = ensemble.config if ensemble.overridden else self._loader.configure(files)
            steps = await self._repository.aside(partial(self._repository.members, config, ensemble.name))
            await self.bring_up(ensemble, files, config, None, ensemble.overridden, steps)
        except ConchError as error:
            LOG.error("failed to load '%s', whose members are back: %s", ensemble.name, error.status)
            return False
        return True

    async def _load_version(
        self, files: ModelFiles, version: int, config: ModelConfig, steps: Mapping[str, str], running: Model | None
    ) -> Model:
        async with no_load_slot() if asked_by_model.get() else self._load_slots.take() as release_slot:
            if running is not None:
                await self._loader.rescale(running, files, config, release_slot)
                return running
            await self._ledger.check(files, version, config)
            for attempt in range(self._retries + 1):
                try:
                    if is_ensemble(config):
                        return await self._loader.load_ensemble(
                            files, version, config, steps, partial(self.step_models, config, steps)
                        )
                    model = await self._loader.load(files, version, config, release_slot)
                    try:
                        await self._ledger.note_load(model, files)
                    except BaseException:
                        await model.stop(0)
                        raise
                    return model
                except ConchError as error:
                    LOG.error("failed to load '%s' version %d: %s", files.key, version, error.status)
                    if attempt == self._retries:
                        raise
        raise AssertionError("unreachable")

    def step_models(self, config: ModelConfig, steps: Mapping[str, str]) -> Mapping[str, Model]:
        """The known models of an ensemble's steps by name; ``steps`` maps names to keys.

        Raises INVALID_ARG for a model that does not serve, or does not serve the version that a step requests.
        """
        known = {
            step.model_name: self._table.models[steps[step.model_name]]
            for step in config.ensemble_scheduling.step
            if steps[step.model_name] in self._table.models
        }
        for name, member in known.items():
            if not member.ready_versions():
                refusal = step_model_not_valid if member.members else step_model_not_loaded
                raise refusal(config.name, name, member.reason)
        problem = version_problem(config, {name: member.ready_versions() for name, member in known.items()})
        if problem is not None:
            raise problem
        return {
            step.model_name: self._table.find(steps[step.model_name], step.model_version)
            for step in config.ensemble_scheduling.step
            if step.model_name in known
        }

    async def _untouched(self, model_state: ModelState, fingerprint: Fingerprint | None) -> dict[int, Model]:
        """Loaded versions with unchanged files."""
        known = model_state.fingerprint
        if known is None or fingerprint is None:
            return {}
        models = [model for model in model_state.models() if known.same_version(fingerprint, model.version)]
        paths = {path for model in models for path in model.external}
        now = await self._repository.aside(partial(take_external, paths))
        return {
            model.version: model
            for model in models
            if all(now[path] == stamps for path, stamps in model.external.items())
        }

    def _note_failure(self, model_state: ModelState, versions: Sequence[int], failed: Mapping[int, ConchError]) -> None:
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

    def _swap(self, model_state: ModelState, models: Sequence[Model]) -> None:
        new = {model.version: model for model in models}
        for version, version_state in list(model_state.versions.items()):
            if version not in new:
                if version_state.state is State.READY:
                    self._retire(version_state)
                else:
                    del model_state.versions[version]
        for version, model in sorted(new.items()):
            previous = model_state.versions[version].model
            model_state.versions[version] = VersionState(State.READY, "", model)
            if previous is model:
                continue
            if previous is not None:
                self.end(previous, None)
            self._registry.register(
                model.statistics,
                tags=dict(model.config.metric_tags),
                namespace=model.namespace,
                cached=model.cache is not None,
            )
        LOG.info("successfully loaded '%s'", model_state.name)

    def retire_all(self, model_state: ModelState) -> None:
        for version_state in model_state.versions.values():
            if version_state.state in (State.READY, State.LOADING):
                self._retire(version_state)
            elif version_state.state is State.UNAVAILABLE:
                version_state.reason = UNLOADED
        model_state.fingerprint = None
        self._dispose(model_state)

    def _retire(self, version_state: VersionState) -> None:
        model = version_state.model
        if model is None:
            version_state.make_unavailable(UNLOADED)
            return
        version_state.state = State.UNLOADING
        self.end(model, version_state)

    def end(self, model: Model, version_state: VersionState | None) -> None:
        model.executor.retire()
        task = asyncio.get_running_loop().create_task(self._end_when_idle(model, version_state))
        self._retiring[task] = model
        task.add_done_callback(self._retiring.pop)

    async def _end_when_idle(self, model: Model, version_state: VersionState | None) -> None:
        in_time = await model.finish(self._unload_seconds or None)
        shown = f"'{model.key}' version {model.version}"
        await end_all(f"measure {shown} before its end", self._ledger.note_end(model))
        if not in_time:
            LOG.warning(
                "the last requests of '%s' version %d, which is unloaded, have taken %g s and fail "
                "(--unload-timeout-secs)", model.name, model.version, self._unload_seconds,
            )  # fmt: skip
            await end_all(f"end {shown} by force", model.stop(0))
        self._registry.unregister(model.statistics, namespace=model.namespace)
        await end_all(f"end {shown}", model.stop())
        self._ledger.note_ended(model)
        if version_state is not None and version_state.model is model:
            version_state.make_unavailable(UNLOADED)
            LOG.info("successfully unloaded '%s' version %d", model.key, model.version)

    @property
    def retiring(self) -> list[Model]:
        """Replaced and unloaded versions that have not ended."""
        return list(self._retiring.values())

    async def finish(self, seconds: float) -> bool:
        """Wait until replaced and unloaded versions have ended.

        After ``seconds``, end them by force and return False.
        """
        if not self._retiring:
            return True
        _, pending = await asyncio.wait(list(self._retiring), timeout=seconds)
        late = [self._retiring[task] for task in pending if task in self._retiring]
        await end_all("end a version by force", *(model.stop(0) for model in late))
        return not pending

    async def dispose_all(self) -> None:
        """Remove all uploaded files; call when no models are running."""
        for model_state in self._table.models.values():
            self._dispose(model_state)
        await end_all("remove uploaded files", *self._disposals)

    async def retired(self, name: str) -> None:
        """Wait until the replaced and unloaded versions of a model have ended."""
        retiring = [task for task, model in self._retiring.items() if model.key == name]
        if retiring:
            await asyncio.wait(retiring)

    def _dispose(self, model_state: ModelState) -> None:
        """Remove uploaded files when no version loaded from them is running."""
        uploaded, model_state.uploaded = model_state.uploaded, None
        if uploaded is None:
            return

        async def close() -> None:
            await self.retired(model_state.name)
            await asyncio.to_thread(uploaded.close)

        task = asyncio.get_running_loop().create_task(close())
        self._disposals.add(task)
        task.add_done_callback(self._disposals.discard)


def _regrouped(model_state: ModelState, config: ModelConfig) -> ModelConfig | None:
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


def _selected_versions(files: ModelFiles, config: ModelConfig) -> tuple[int, ...]:
    """The versions that the policy selects; logs warnings. May be empty."""
    selection = select_versions(config, files.versions)
    for warning in files.warnings:
        LOG.warning("%s", warning)
    for version in selection.missing:
        LOG.warning("%s", missing_version_warning(files.name, version))
    return selection.versions


def _as_error(name: str, version: int, error: BaseException) -> ConchError:
    """The error of a failed load; an exception other than ConchError is logged and becomes INTERNAL."""
    if isinstance(error, ConchError):
        return error
    LOG.error("failed to load '%s' version %d", name, version, exc_info=error)
    return internal(repr(error))


def _load_failed(name: str, failed: Mapping[int, ConchError]) -> ConchError:
    def message(reasons: Mapping[int, str]) -> str:
        told = [at_state(version, State.UNAVAILABLE, reason) for version, reason in sorted(reasons.items())]
        return f"load failed for model '{name}': {' '.join(told)}\n"

    public = message({version: error.public_status for version, error in failed.items()})
    return ConchError(
        message({version: error.status for version, error in failed.items()}),
        Code.INVALID_ARG,
        public=without_directories(public),
    )
