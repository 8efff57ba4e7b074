"""A server that runs already, conch or NVIDIA's, whose models are loaded with configurations of the analyzer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import orjson

from conch.analyze.servers.base import Configs, Overrides
from conch.analyze.servers.control import ControlClient
from conch.config import render
from conch.config.editing import merge
from conch.errors import invalid
from conch.perf.channels.connecting import Address


class RemoteServer:
    """``models`` of a server and those that they are made of; see :class:`AnalyzedServer`.

    Without ``reload`` they stay as they are.  What was loaded, and how, is so again after ``close``.

    Raises UNAVAILABLE for a server that does not let clients load models, INVALID_ARG for one whose repository has not
    got them.
    """

    def __init__(self, control: ControlClient, address: Address, models: Sequence[str], *, reload: bool = True) -> None:
        self.address = address
        self._control, self._reload = control, reload
        missing = [model for model in models if model not in control.known()]
        if missing:
            known = ", ".join(sorted(control.known())) or "none"
            raise invalid(
                f"the server at {control.where} has no model '{missing[0]}' in its repository; it has {known}"
            )
        before = {model: control.config(model) for model in control.ready()} if reload else {}
        for model in models if reload else ():
            control.load(model)
        self._base = control.configs(models)
        self._before = {model: before.get(model) for model in self._base}

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, overrides: Overrides) -> Configs:
        """See :meth:`AnalyzedServer.load`; what changes is what the server made of the repository's configuration."""
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
            # An ensemble's load may have taken those that it is made of from the repository again.
            if overrides.get(model) and self._control.config(model) != loaded[model]:
                self._load(model, overrides)
        return {model: self._control.config(model) for model in self._base}

    def check(self) -> None:
        self._control.known()

    def complaints(self) -> str:
        return ""

    def restart(self) -> None:
        """See whether the server is there again; somebody else starts it."""
        self._control.known()

    def close(self) -> None:
        """Load the models as they were before, and unload those that were not there."""
        for model in self._base if self._reload else ():
            self._control.load(model)
            before = self._before[model]
            if before is not None and self._control.config(model) != before:
                self._control.load(model, before)
        for model in reversed(self._base) if self._reload else ():
            if self._before[model] is None:
                self._control.unload(model)

    def _load(self, model: str, overrides: Overrides) -> None:
        changes = overrides.get(model)
        self._control.load(model, _changed(self._base[model], changes) if changes else None)


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with changes, both as the server shows them."""
    merged = merge(render.from_json(orjson.dumps(config).decode()), changes)
    found: Mapping[str, Any] = orjson.loads(render.to_json(merged))
    return found
