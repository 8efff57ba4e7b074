"""A server whose models are loaded when the test says, for the tests of front ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conch.core.errors import ConchError
from conch.server.models.on_demand import LoadNeeded


class LateModels:
    """Stands before a server's ``model``: models named in ``missing`` have to be waited for."""

    def __init__(self, find: Callable[..., Any]) -> None:
        self._find = find
        self.missing: set[str] = set()
        self.waiting: list[tuple[str, Callable[[ConchError | None], None]]] = []

    def model(self, name: str, version: int = -1) -> Any:
        if name in self.missing:
            raise LoadNeeded(name, self)  # type: ignore[arg-type]
        return self._find(name, version)

    def wait(
        self, name: str, proceed: Callable[[ConchError | None], None], *, caller: str | None = None
    ) -> Callable[[], None]:
        entry = (name, proceed)
        self.waiting.append(entry)
        return lambda: self.waiting.remove(entry) if entry in self.waiting else None

    def load(self, name: str, error: ConchError | None = None) -> None:
        """Let requests for a model proceed, with ``error`` if its load has failed."""
        if error is None:
            self.missing.discard(name)
        waiting, self.waiting = self.waiting, [entry for entry in self.waiting if entry[0] != name]
        for waited, proceed in waiting:
            if waited == name:
                proceed(error)
