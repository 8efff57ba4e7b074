"""The state of every model and version that was ever loaded or tried.

Only the lifecycle writes it; front ends, ensembles and calling models look models up in it.  Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from conch.config.schema import ModelConfig
from conch.errors import ConchError, not_found, unavailable
from conch.repository.fingerprint import Fingerprint
from conch.repository.override import UploadedModel
from conch.server.model import Model
from conch.telemetry.memory import ModelMemory

UNLOADED = "unloaded"
#: How many models of clients' own are remembered after they were unloaded, as the repository index shows them.
MAX_UNLOADED: Final = 1000


class State(StrEnum):
    """States of a version, as the repository index shows them."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


def at_state(version: int, state: State, reason: str) -> str:
    """The part of a message about one version that does not serve."""
    return f"version {version} is at {state} state: {reason};"


@dataclass(slots=True)
class VersionState:
    """One version: its state, why it is not available, and the model that serves it."""

    state: State
    reason: str = ""
    model: Model | None = None

    def make_unavailable(self, reason: str) -> None:
        self.state, self.reason, self.model = State.UNAVAILABLE, reason, None


@dataclass(slots=True)
class ModelState:
    """One model: its versions, and what they were loaded from."""

    name: str
    versions: dict[int, VersionState] = field(default_factory=dict)
    config: ModelConfig | None = None
    fingerprint: Fingerprint | None = None
    #: Whether somebody asked for it by name, rather than an ensemble needing it.
    wanted: bool = False
    #: Whether the last load brought a configuration or files of its own.
    overridden: bool = False
    uploaded: UploadedModel | None = None
    #: What the versions took that have been loaded before, by their numbers; see the memory ledger.
    memory: dict[int, ModelMemory] = field(default_factory=dict)
    #: Why it could not be read from the repository.
    poll_reason: str = ""

    def ready_versions(self) -> list[int]:
        return sorted(version for version, version_state in self.versions.items() if version_state.state is State.READY)

    def models(self) -> list[Model]:
        """The models that serve, in order of their versions."""
        return [
            version_state.model
            for _, version_state in sorted(self.versions.items())
            if version_state.model and version_state.state is State.READY
        ]

    @property
    def is_unloaded(self) -> bool:
        """Whether all versions have been unloaded on purpose."""
        return all(
            version_state.state is State.UNAVAILABLE and version_state.reason == UNLOADED
            for version_state in self.versions.values()
        )

    @property
    def reason(self) -> str:
        """Why no version serves."""
        reasons = (
            at_state(version, version_state.state, version_state.reason)
            for version, version_state in sorted(self.versions.items())
            if version_state.reason
        )
        return " ".join(reasons) or self.poll_reason

    @property
    def members(self) -> set[str]:
        """The models that the steps of an ensemble name."""
        return {step.model_name for step in self.config.ensemble_scheduling.step} if self.config else set()


def _still_loading(name: str) -> ConchError:
    return unavailable(f"model '{name}' is not ready: it is being loaded")


class ModelTable:
    """Every model that was ever loaded or tried, by name."""

    def __init__(self) -> None:
        self.models: dict[str, ModelState] = {}
        #: The models that the server loads when it starts, as long as it does; None until it knows them.
        self.starting: Collection[str] | None = ()

    def find(self, name: str, version: int = -1) -> Model:
        """The model to use; version -1 is the latest that is ready.

        Raises NOT_FOUND or UNAVAILABLE with Triton's words, and UNAVAILABLE for a model that is being loaded for the
        first time: Triton says NOT_FOUND then, and opens no port while it starts.
        """
        model_state = self.models.get(name)
        if model_state is None:
            if self.starting is None or name in self.starting:
                raise _still_loading(name)
            raise not_found(f"Request for unknown model: '{name}' is not found")
        if version == -1:
            ready = model_state.ready_versions()
            if not ready:
                if any(one.state is State.LOADING for one in model_state.versions.values()):
                    raise _still_loading(name)
                raise not_found(f"Request for unknown model: '{name}' has no available versions")
            version = ready[-1]
        version_state = model_state.versions.get(version)
        if version_state is None:
            raise not_found(f"Request for unknown model: '{name}' version {version} is not found")
        if version_state.state is not State.READY or version_state.model is None:
            raise unavailable(f"Request for unknown model: '{name}' version {version} is not at ready state")
        return version_state.model

    def forget_unloaded(self, in_use: Callable[[str], bool]) -> None:
        """Forget the oldest models that clients brought and that are unloaded, beyond ``MAX_UNLOADED``.

        Clients choose their names.  Those ``in_use`` stay, as they may be being loaded.
        """
        unloaded = [
            name for name, model_state in self.models.items() if model_state.overridden and model_state.is_unloaded
        ]
        for name in unloaded[:-MAX_UNLOADED]:
            if not in_use(name):
                del self.models[name]

    def loaded(self) -> list[Model]:
        """Every model that serves."""
        return [model for model_state in self.models.values() for model in model_state.models()]

    def index(self, directories: Iterable[str], ready_only: bool) -> list[dict[str, str]]:
        """The repository index of the models here and of ``directories``, which may never have been loaded."""
        entries: list[dict[str, str]] = []
        for name in sorted({*directories, *self.models}):
            model_state = self.models.get(name)
            if model_state is None or model_state.poll_reason:
                if not ready_only:
                    reason = model_state.poll_reason if model_state is not None else ""
                    entries.append({"name": name, **({"reason": reason} if reason else {})})
                continue
            for version, version_state in sorted(model_state.versions.items()):
                if ready_only and version_state.state is not State.READY:
                    continue
                entry = {"name": name, "version": str(version), "state": str(version_state.state)}
                if version_state.reason:
                    entry["reason"] = version_state.reason
                entries.append(entry)
        return entries

    def is_ready(self, model: Model) -> bool:
        """Whether requests to ``model`` can run now; an ensemble is as ready as its members."""
        if not model.ready:
            return False
        for step in model.config.ensemble_scheduling.step:
            try:
                if not self.is_ready(self.find(step.model_name, step.model_version)):
                    return False
            except ConchError:
                return False
        return True

    def ready_names(self, names: Iterable[str]) -> bool:
        """Whether the latest version of each of these models can be used now."""
        try:
            return all(self.is_ready(self.find(name)) for name in names)
        except ConchError:
            return False

    def all_ready(self) -> bool:
        """Strict readiness: every version serves, or was unloaded on purpose."""
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
