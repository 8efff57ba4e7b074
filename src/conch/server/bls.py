"""The server as its models see it, which call each other (BLS), load and unload each other.

Requests of models are accepted as those of ensembles are: also while the server stops, since a request from
outside waits for them.  Lives on the event loop.
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
    """What loads and unloads models; the server."""

    async def load_with(self, name: str, parameters: Mapping[str, object]) -> None: ...

    async def unload(self, name: str, dependents: bool = False) -> None: ...


class BlsModels:
    """See :class:`conch.workers.host.bls.Models`."""

    def __init__(self, table: ModelTable, control: ModelControl) -> None:
        self._table = table
        self._control = control
        #: Models that are being loaded because another asked for it that is being loaded itself: which one.
        self._askers: dict[str, str] = {}

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
        with self._asked(name, starting):
            asked_by_model.set(True)
            await self._control.load_with(name, parameters)

    async def unload(self, name: str, dependents: bool) -> None:
        await self._control.unload(name, dependents)

    @contextmanager
    def _asked(self, name: str, starting: str) -> Iterator[None]:
        """Refuse to load what the load of ``starting`` would wait for while it waits for ``starting``."""
        asker = starting
        while asker:
            if asker == name:
                raise invalid(f"model '{name}' waits for this load while it is being loaded itself")
            asker = self._askers.get(asker, "")
        if not starting or name in self._askers:
            yield
            return
        self._askers[name] = starting
        try:
            yield
        finally:
            del self._askers[name]
