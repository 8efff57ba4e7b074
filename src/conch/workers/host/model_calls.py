"""Handles calls from a worker's model to the server: BLS, custom metrics and readiness.

Owned by a ``WorkerProcess``; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from conch.core.inference import InferRequest, ignore
from conch.telemetry.custom import CustomMetrics
from conch.workers.child.channel import Header
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.host.bls import BlsHandler, BlsServer
from conch.workers.host.custom_metrics import MetricsHandler

#: Frames with which a worker replies to the server; it sends all other frames unprompted.
ANSWERS: Final = frozenset({"completed", "preloads", "ready", "failed", "stopped"})


class ModelCalls:
    """Handles the calls of one worker; ``send`` writes a frame to it, ``running`` are its in-flight requests."""

    def __init__(
        self, send: Callable[[Header, Packer | None], None], running: Mapping[int, InferRequest] | None = None
    ) -> None:
        self._send = send
        self._running = running
        self._bls: BlsHandler | None = None
        self._metrics: MetricsHandler | None = None
        #: Whether the model has reported itself ready; True if it reports nothing.
        self.model_ready = True

    def serve_bls(self, models: BlsServer, caller: str) -> None:
        """Enable BLS: let the worker of the model ``caller`` send requests to ``models``."""
        self._bls = BlsHandler(models, caller, self._send, self._running)

    def show_metrics(self, metrics: CustomMetrics) -> None:
        """Enable custom metrics: let the worker's model add its own to ``metrics``."""
        self._metrics = MetricsHandler(metrics.holder(), lambda header: self._send(header, None))

    @property
    def busy(self) -> bool:
        """Whether a BLS call is in progress, so that the worker may be waiting for its reply."""
        return self._bls is not None and self._bls.busy

    def handle(self, header: Header, unpacker: Unpacker) -> bool:
        """Handle a call frame; return False for other frames.

        Malformed frames raise LookupError, TypeError or ValueError.
        """
        if header["op"] == "model_ready":
            self.model_ready = bool(header["ready"])
            return True
        if self._metrics is not None and self._metrics.handle(header):
            return True
        return self._bls is not None and self._bls.handle(header, unpacker)

    def close(self) -> None:
        """Cancel the worker's calls and release its metrics because it has ended."""
        if self._metrics is not None:
            self._metrics.close()
        if self._bls is not None:
            self._bls.close()
        self._bls = self._metrics = None
        self._send = ignore  # break the reference cycle with the owner
