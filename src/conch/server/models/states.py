"""The states of all models and versions for which a load was attempted.

Only the lifecycle changes them; front ends, ensembles and models that call other models look models up. Used on the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from conch.config.reading import shown_name
from conch.config.schema import ModelConfig
from conch.config.validate_ensemble import step_model_not_loaded, step_model_not_valid, version_problem
from conch.core.errors import ConchError, invalid, not_found, unavailable
from conch.repository.fingerprint import Fingerprint
from conch.repository.names import Naming
from conch.repository.override import UploadedModel
from conch.server.model import Model
from conch.telemetry.memory import ModelMemory

UNLOADED = "unloaded"
#: Number of unloaded models with client overrides that stay in the repository index.
MAX_UNLOADED: Final = 1000


class State(StrEnum):
    """The state of a version in the repository index."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


def at_state(version: int, state: State, reason: str) -> str:
    """The part of a message about a version that does not serve."""
    return f"version {version} is at {state} state: {reason};"


@dataclass(slots=True)
class VersionState:
    """A version: its state, the reason if it is unavailable, and the model that serves it."""

    state: State
    reason: str = ""
    model: Model | None = None

    @property
    def shown(self) -> tuple[State, str]:
        """State and reason for clients; a remote model is unavailable while its servers are."""
        if self.state is State.READY and self.model is not None and self.model.unavailable_reason:
            return State.UNAVAILABLE, self.model.unavailable_reason
        return self.state, self.reason

    def make_unavailable(self, reason: str) -> None:
        self.state, self.reason, self.model = State.UNAVAILABLE, reason, None


@dataclass(slots=True)
class ModelState:
    """A model, identified by its key: its versions, configuration and files."""

    name: str
    versions: dict[int, VersionState] = field(default_factory=dict)
    config: ModelConfig | None = None
    fingerprint: Fingerprint | None = None
    #: Whether it was loaded by name, not only as a step of an ensemble.
    wanted: bool = False
    #: Whether the last load sent a configuration or files.
    overridden: bool = False
    uploaded: UploadedModel | None = None
    #: Measured memory of versions that were loaded before, by number; see the memory ledger.
    memory: dict[int, ModelMemory] = field(default_factory=dict)
    #: The error of the last attempt to read it from the repository.
    poll_reason: str = ""
    #: The reason if no version can be loaded.
    version_reason: str = ""
    #: Keys of the models in an ensemble's steps, by name.
    steps: Mapping[str, str] = field(default_factory=dict)

    def ready_versions(self) -> list[int]:
        return sorted(
            [version for version, version_state in self.versions.items() if version_state.state is State.READY]
        )

    def latest(self) -> VersionState | None:
        """The highest ready version."""
        latest, highest = None, -1
        for version, version_state in self.versions.items():  # called for every request: a loop is faster than max
            if version > highest and version_state.state is State.READY:
                latest, highest = version_state, version
        return latest

    def models(self) -> list[Model]:
        """The models of the ready versions, in order of version."""
        return [
            version_state.model
            for _, version_state in sorted(self.versions.items())
            if version_state.model and version_state.state is State.READY
        ]

    @property
    def is_unloaded(self) -> bool:
        """Whether all versions were unloaded on purpose."""
        return all(
            version_state.state is State.UNAVAILABLE and version_state.reason == UNLOADED
            for version_state in self.versions.values()
        )

    @property
    def is_disabled(self) -> bool:
        """Whether all versions are unavailable because of a failed load or a failed ensemble step."""
        states = self.versions.values()
        return bool(states) and all(
            version_state.state is State.UNAVAILABLE and version_state.reason != UNLOADED for version_state in states
        )

    @property
    def reason(self) -> str:
        """The reason why no version serves."""
        reasons = (
            at_state(version, version_state.state, version_state.reason)
            for version, version_state in sorted(self.versions.items())
            if version_state.reason
        )
        return " ".join(reasons) or self.poll_reason or self.version_reason

    @property
    def step_keys(self) -> set[str]:
        """Keys of the models in an ensemble's steps."""
        return set(self.steps.values())


def _still_loading(name: str) -> ConchError:
    return unavailable(f"model '{name}' is not ready: it is being loaded")


def ambiguous(name: str, count: int) -> ConchError:
    """The error for a name that several models have. Source: Triton 2.51."""
    return invalid(
        f"There are {count} identifiers of model '{name}' in global map, model namespace must be provided to resolve"
        " ambiguity.",
        "model",
    )


class ModelTable:
    """All models for which a load was attempted, by key; see :mod:`conch.repository.names`."""

    def __init__(self, naming: Naming | None = None) -> None:
        self.naming = naming or Naming()
        self.models: dict[str, ModelState] = {}
        #: Models to load during startup, empty afterwards; None until they are determined.
        self.starting: frozenset[str] | None = frozenset()
        #: Called when versions of a model become ready.
        self.on_ready: Callable[[], None] = lambda: None

    def find(self, key: str, version: int = -1) -> Model:
        """The model for a request; version -1 is the latest ready version.

        Raises NOT_FOUND or UNAVAILABLE with Triton's messages, and UNAVAILABLE for a model during its first load:
        Triton raises NOT_FOUND then, but opens no ports while it starts.
        """
        model_state = self.models.get(key)
        if model_state is not None:
            version_state = model_state.latest() if version == -1 else model_state.versions.get(version)
            if version_state is not None and version_state.state is State.READY and version_state.model is not None:
                return version_state.model
        raise self._missing(key, version)

    def _missing(self, key: str, version: int) -> ConchError:
        """The error for a model that was not found; its message omits the repository path."""
        model_state, name = self.models.get(key), self.naming.name(key)
        if model_state is None:
            if self.starting is None:
                return unavailable(f"model '{name}' is not ready: the server has not read its model repository yet")
            if not self.starting.isdisjoint(self.naming.keys(key)):
                return _still_loading(name)
            return not_found(f"Request for unknown model: '{name}' is not found")
        ready = model_state.ready_versions()
        if version == -1 and not ready:
            if any(version_state.state is State.LOADING for version_state in model_state.versions.values()):
                return _still_loading(name)
            return not_found(f"Request for unknown model: '{name}' has no available versions")
        version = ready[-1] if version == -1 else version
        if version not in model_state.versions:
            return not_found(f"Request for unknown model: '{name}' version {version} is not found")
        return unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")

    def named(self, name: str, version: int = -1) -> Model:
        """The model for a request, by name; raises as :meth:`find` and :meth:`key` do."""
        return self.find(self.key(name) if self.naming else name, version)

    def key(self, name: str) -> str:
        """The key of the only model with a name, ignoring unloaded models; the name itself without such a model.

        Raises INVALID_ARG if several models have the name.
        """
        keys = self.keys(name)
        if len(keys) > 1:
            keys = [key for key in keys if not self.models[key].is_unloaded] or keys[:1]
        if len(keys) > 1:
            raise ambiguous(name, len(keys))
        return keys[0] if keys else name

    def keys(self, name: str) -> list[str]:
        """Keys of all models in the table with a name."""
        return [key for key in self.naming.keys(name) if key in self.models]

    def forget_unloaded(self, in_use: Callable[[str], bool]) -> None:
        """Remove the oldest unloaded models with client overrides if there are more than ``MAX_UNLOADED``.

        This limits the table, because clients choose the names. Models ``in_use`` stay: they may be loading.
        """
        unloaded = [
            name for name, model_state in self.models.items() if model_state.overridden and model_state.is_unloaded
        ]
        for name in unloaded[:-MAX_UNLOADED]:
            if not in_use(name):
                del self.models[name]

    def step_models(self, config: ModelConfig, steps: Mapping[str, str]) -> Mapping[str, Model]:
        """The known models of an ensemble's steps by name; ``steps`` maps names to keys.

        Raises INVALID_ARG for a model that does not serve, or does not serve the version that a step requests.
        """
        known = {
            step.model_name: self.models[steps[step.model_name]]
            for step in config.ensemble_scheduling.step
            if steps[step.model_name] in self.models
        }
        for name, model_state in known.items():
            if not model_state.ready_versions():
                refusal = step_model_not_valid if model_state.step_keys else step_model_not_loaded
                raise refusal(config.name, name, model_state.reason)
        problem = version_problem(config, {name: model_state.ready_versions() for name, model_state in known.items()})
        if problem is not None:
            raise problem
        return {
            step.model_name: self.find(steps[step.model_name], step.model_version)
            for step in config.ensemble_scheduling.step
            if step.model_name in known
        }

    def serving_names(self) -> set[str]:
        """Names of all models with a ready version."""
        return {self.naming.name(key) for key, model_state in self.models.items() if model_state.ready_versions()}

    def loaded(self) -> list[Model]:
        """All models that serve."""
        return [model for model_state in self.models.values() for model in model_state.models()]

    def index(self, directories: Iterable[str], ready_only: bool) -> list[dict[str, str]]:
        """The repository index of the models in the table and in ``directories``, which may never have been loaded."""
        entries: list[dict[str, str]] = []
        keys = list(dict.fromkeys([*directories, *sorted(self.models)]))
        for key in keys if self.naming else sorted(keys):
            model_state, name = self.models.get(key), self.naming.name(key)
            if model_state is None or model_state.poll_reason:
                if not ready_only:
                    reason = model_state.poll_reason if model_state is not None else ""
                    entries.append({"name": name, **({"reason": reason} if reason else {})})
                continue
            for version, version_state in sorted(model_state.versions.items()):
                state, reason = version_state.shown
                if ready_only and state is not State.READY:
                    continue
                entry = {"name": name, "version": str(version), "state": str(state)}
                if reason:
                    entry["reason"] = reason
                entries.append(entry)
        return entries

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, version and status of each version, for the table in the startup log."""
        rows = []
        for name, model_state in sorted(self.models.items()):
            if not model_state.versions:
                rows.append((shown_name(name), "-", "Not loaded: No model version was found"))
            for version, version_state in sorted(model_state.versions.items()):
                status = ": ".join(filter(None, version_state.shown))
                rows.append((shown_name(name), str(version), status))
        return rows

    def is_ready(self, model: Model) -> bool:
        """Whether requests to ``model`` can run now; an ensemble is ready if the models of its steps are."""
        if not model.ready:
            return False
        for step in model.config.ensemble_scheduling.step:
            try:
                if not self.is_ready(self.find(model.steps[step.model_name], step.model_version)):
                    return False
            except ConchError:
                return False
        return True

    def ready_names(self, names: Iterable[str]) -> bool:
        """Whether the latest version of each model is ready."""
        try:
            return all(self.is_ready(self.find(name)) for name in names)
        except ConchError:
            return False

    def all_ready(self) -> bool:
        """Strict readiness: whether every version serves or was unloaded on purpose."""
        for model_state in self.models.values():
            if not model_state.versions:
                return False
            for version_state in model_state.versions.values():
                if version_state.state is State.READY:
                    if version_state.model is None or not version_state.model.ready:
                        return False
                elif version_state.state is not State.UNAVAILABLE or version_state.reason != UNLOADED:
                    return False
        return True
