"""A running server, conch or Triton, whose models are loaded with the configurations of the analysis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

import orjson

from conch.config import render
from conch.config.editing import merge
from conch.core.errors import ConchError, internal, invalid
from conch.measure.analyze.servers.base import Configs, ControlClient, Overrides, ServerGone, ServerLost
from conch.measure.perf.senders.channels.connecting import Address

#: Interval between checks whether a server has returned (s).
_PAUSE: Final = 0.5


class RemoteServer:
    """Measures ``models`` of a running server and their ensemble steps; see :class:`AnalyzedServer`.

    Without ``reload``, models stay as they are. ``close`` restores the loaded models and their configurations.

    Raises UNAVAILABLE for a server that does not let clients load models, and INVALID_ARG if its repository lacks a
    model.
    """

    def __init__(self, control: ControlClient, address: Address, models: Sequence[str], *, reload: bool = True) -> None:
        self.address = address
        self._control, self._reload = control, reload
        known = control.known()
        missing = [model for model in models if model not in known]
        if missing:
            raise invalid(
                f"the server at {control.where} has no model '{missing[0]}' in its repository;"
                f" it has {', '.join(sorted(known)) or 'none'}"
            )
        #: The configurations of the models that were loaded before.
        self._before: Mapping[str, Mapping[str, Any]] = (
            {model: control.config(model) for model in control.ready()} if reload else {}
        )
        self._base: dict[str, Mapping[str, Any]] = {}
        try:
            for model in models if reload else ():
                self._base = {**self._base, model: {}}
                control.load(model)
            self._base = control.configs(models)
        except BaseException:
            with suppress(ConchError):  # the first error is the relevant one
                self.close()
            raise

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, overrides: Overrides) -> Configs:
        """See :meth:`AnalyzedServer.load`; overrides apply to the configurations as completed by the server."""
        if not self._reload:
            return self._control.configs(list(self._base))
        ready = self._control.ready()
        for model in reversed(self._base):
            if model in ready:
                self._control.unload(model)
        loaded = {}
        for model in self._base:
            self._load(model, overrides)
            loaded[model] = self._control.config(model)
        for model in self._base:
            # Loading an ensemble may have reloaded its steps from the repository.
            if overrides.get(model) and self._control.config(model) != loaded[model]:
                self._load(model, overrides)
        return {model: self._control.config(model) for model in self._base}

    def check(self) -> None:
        self._control.known()

    def complaints(self) -> str:
        return ""

    def restart(self) -> None:
        """Wait until the server returns; it is not started here."""
        end = time.monotonic() + self._control.timeout
        while True:
            try:
                self._control.known()
                return
            except ServerGone as error:
                if time.monotonic() > end:
                    raise ServerLost(error.message, error.code) from error
                time.sleep(_PAUSE)

    def close(self) -> None:
        """Unload the models that were not loaded before, and restore the others.

        A failure does not stop the rest. Raises INTERNAL, naming the models that could not be restored.
        """
        if not self._reload:
            return
        failed = {}
        new = [model for model in reversed(self._base) if model not in self._before]
        for model in (*new, *(model for model in self._base if model in self._before)):
            try:
                self._restore(model)
            except ConchError as error:
                failed[model] = error.message
        if failed:
            failures = "; ".join(f"'{model}': {message}" for model, message in failed.items())
            raise internal(f"the server at {self._control.where} could not restore its original models: {failures}")

    def _restore(self, model: str) -> None:
        before = self._before.get(model)
        if before is None:
            if model in self._control.ready():
                self._control.unload(model)
            return
        self._control.load(model)
        if self._control.config(model) != before:
            self._control.load(model, before)

    def _load(self, model: str, overrides: Overrides) -> None:
        changes = overrides.get(model)
        self._control.load(model, _changed(self._base[model], changes) if changes else None)


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with changes; both have the form that the server shows."""
    merged = merge(render.from_json(orjson.dumps(config).decode()), changes)
    changed: Mapping[str, Any] = orjson.loads(render.to_json(merged))
    return changed
