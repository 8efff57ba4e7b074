"""Business logic scripting (BLS): inference requests, loads and unloads that models request of the server.

Requests from models are also accepted while the server stops, because the request of a client may depend on them. Runs
on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from conch.core.errors import ConchError, cancelled, error_text, internal, invalid
from conch.core.inference import InferRequest, InferResponse
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded

LOG = logging.getLogger("conch")


class ModelControl(Protocol):
    """The interface that finds, loads and unloads models; see :class:`conch.server.core.InferenceServer`."""

    def model(self, name: str, version: int = -1) -> Model: ...

    def model_ready(self, name: str, version: int = -1) -> bool: ...

    async def load_with(self, name: str, parameters: Mapping[str, object]) -> None: ...

    async def unload(self, name: str, dependents: bool = False) -> None: ...


class BlsModels:
    """Serves the BLS calls of models; see :class:`conch.workers.host.bls.BlsServer`."""

    def __init__(self, control: ModelControl) -> None:
        self._control = control
        #: Loads that models requested during their own loads: the requested model and the requesting one.
        self._requests: list[tuple[str, str]] = []

    def infer(self, request: InferRequest, decoupled: bool, caller: str) -> None:
        name = request.model_name
        try:
            model = self._control.model(name, request.model_version)
        except LoadNeeded as needed:
            self._wait(needed, request, decoupled, caller)
            return
        except ConchError:
            raise _not_ready(name) from None
        if model.signature.decoupled and not decoupled:
            raise internal(
                f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
                "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
                "calls for decoupled models.'"
            )
        model.run_step(request)

    def _wait(self, needed: LoadNeeded, request: InferRequest, decoupled: bool, caller: str) -> None:
        """Run a request when its model is loaded."""
        on_response = request.on_response  # a refused request releases it

        def proceed(error: ConchError | None) -> None:
            request.on_cancel = None
            try:
                if error is not None:
                    raise _not_ready(request.model_name)
                self.infer(request, decoupled, caller)
            except ConchError as refusal:
                on_response(InferResponse(error=refusal))
            except Exception as failure:
                LOG.exception("a request of a model to '%s' failed", request.model_name)
                on_response(InferResponse(error=internal(error_text(failure))))

        stop_waiting = needed.then(proceed, caller=caller)

        def cancel(request: InferRequest) -> None:
            stop_waiting()
            request.fail(cancelled())

        request.on_cancel = cancel

    def is_ready(self, name: str, version: int) -> bool:
        return self._control.model_ready(name, version)

    async def load(self, name: str, parameters: Mapping[str, object], starting: str) -> None:
        with self._requested_by(name, starting):
            await self._control.load_with(name, parameters)

    async def unload(self, name: str, dependents: bool) -> None:
        await self._control.unload(name, dependents)

    @contextmanager
    def _requested_by(self, name: str, starting: str) -> Iterator[None]:
        """Record, during the block, that the load of ``starting`` waits for the load of ``name``.

        Raises INVALID_ARG if the load of ``name`` already waits for ``starting``, directly or indirectly. ``starting``
        is empty if the caller is not loading.
        """
        if not starting:
            yield
            return
        waiting = [starting]
        for model in waiting:
            waiting += [by for requested, by in self._requests if requested == model and by not in waiting]
        if name in waiting:
            raise invalid(f"model '{name}' waits for this load while it is being loaded itself")
        request = name, starting
        self._requests.append(request)
        try:
            yield
        finally:
            self._requests.remove(request)


def _not_ready(name: str) -> ConchError:
    return internal(f"Failed for execute the inference request. Model '{name}' is not ready.")
