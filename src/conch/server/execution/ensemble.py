"""Runs the requests of an ensemble model: nothing waits here, its members have the queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

from conch.errors import ConchError
from conch.inference import InferRequest
from conch.schedulers.ensemble import Ensemble
from conch.workers.host.process import WorkerProcess


class EnsembleExecutor:
    """The executor of an ensemble; see :class:`conch.server.model.Executor`."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble

    @property
    def ready(self) -> bool:
        """An ensemble is as ready as its members, which the server knows."""
        return True

    @property
    def away(self) -> str:
        """Its members know it of themselves."""
        return ""

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """An ensemble has none of its own."""
        return ()

    @property
    def sequences(self) -> int:
        """Its members have the sequences."""
        return 0

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to a sequence that is under way in one of its members."""
        return self._ensemble.continues(request)

    def submit(self, request: InferRequest) -> None:
        request.times.queued = monotonic_ns()
        self._ensemble.run(request)

    def fail_waiting(self, error: ConchError) -> None:
        """Nothing waits here."""

    def set_log(self, levels: Mapping[str, Any]) -> None:
        """No code of an ensemble logs."""

    def retire(self) -> None:
        """Its members have the sequences."""

    def abandon(self) -> None:
        """Its steps are other models' requests."""

    async def stop(self, seconds: float | None) -> None:
        """There is nothing to stop."""
