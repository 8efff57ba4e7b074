"""The server as its models see it: they call, load and unload each other (BLS).

Requests of models, like those of ensembles, are accepted while the server stops too, since a client's request waits for
them.  Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from conch.errors import ConchError, internal, invalid
from conch.inference import InferRequest
from conch.server.rollout import asked_by_model
from conch.server.states import ModelTable


class ModelControl(Protocol):
    """What loads and unloads models: :class:`conch.server.core.Server`."""

    async def load_with(self, name: str, parameters: Mapping[str, object]) -> None: ...

    async def unload(self, name: str, dependents: bool = False) -> None: ...


class BlsModels:
    """Finds, loads and unloads models for models; see :class:`conch.workers.host.bls.BlsServer`."""

    def __init__(self, table: ModelTable, control: ModelControl) -> None:
        self._table = table
        self._control = control
        #: The models that are being loaded at the request of one that is being loaded itself: that one, by their name.
        self._requesters: dict[str, str] = {}

    def infer(self, request: InferRequest, decoupled: bool) -> None:
        name = request.model_name
        try:
            model = self._table.find(name, request.model_version)
        except ConchError:
            raise internal(f"Failed for execute the inference request. Model '{name}' is not ready.") from None
        if model.signature.decoupled and not decoupled:
            raise internal(
                f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
                "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'"
            )
        model.run_step(request)

    def is_ready(self, name: str, version: int) -> bool:
        try:
            return self._table.is_ready(self._table.find(name, version))
        except ConchError:
            return False

    async def load(self, name: str, parameters: Mapping[str, object], starting: str) -> None:
        with self._requested_by(name, starting):
            asked_by_model.set(True)
            await self._control.load_with(name, parameters)

    async def unload(self, name: str, dependents: bool) -> None:
        await self._control.unload(name, dependents)

    @contextmanager
    def _requested_by(self, name: str, starting: str) -> Iterator[None]:
        """Refuse to load what the load of ``starting`` would wait for while it waits for ``starting``."""
        requester = starting
        while requester:
            if requester == name:
                raise invalid(f"model '{name}' waits for this load while it is being loaded itself")
            requester = self._requesters.get(requester, "")
        if not starting or name in self._requesters:
            yield
            return
        self._requesters[name] = starting
        try:
            yield
        finally:
            del self._requesters[name]
