"""What a worker's model asks of the server and tells it: calls of other models (BLS), metrics of its own, readiness.

Belongs to a ``WorkerProcess``; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from conch.inference import InferRequest
from conch.telemetry.custom import CustomMetrics
from conch.workers.child.channel import Header
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.host.bls import BlsHandler, BlsServer
from conch.workers.host.custom_metrics import MetricsHandler

#: Frames with which a worker answers the server; all others are its own.
ANSWERS: Final = frozenset({"completed", "preloads", "ready", "failed", "stopped"})


class ModelCalls:
    """The calls of one worker; ``send`` writes a frame to it, ``running`` are the requests that it has."""

    def __init__(
        self, send: Callable[[Header, Packer | None], None], running: Mapping[int, InferRequest] | None = None
    ) -> None:
        self._send = send
        self._running = running
        self._bls: BlsHandler | None = None
        self._metrics: MetricsHandler | None = None
        #: Whether the model is ready, as far as it says anything about it.
        self.model_ready = True

    def serve_bls(self, models: BlsServer, caller: str) -> None:
        """Let the worker, of the model ``caller``, send requests to ``models``."""
        self._bls = BlsHandler(models, caller, self._send, self._running)

    def show_metrics(self, metrics: CustomMetrics) -> None:
        """Let the worker's model have metrics of its own among ``metrics``."""
        self._metrics = MetricsHandler(metrics.holder(), lambda header: self._send(header, None))

    @property
    def busy(self) -> bool:
        """Whether the worker may be waiting for an answer."""
        return self._bls is not None and self._bls.busy

    def handle(self, header: Header, unpacker: Unpacker) -> bool:
        """Handle a frame if it is a call; malformed ones raise LookupError, TypeError or ValueError."""
        if header["op"] == "model_ready":
            self.model_ready = bool(header["ready"])
            return True
        if self._metrics is not None and self._metrics.handle(header):
            return True
        return self._bls is not None and self._bls.handle(header, unpacker)

    def close(self) -> None:
        """Cancel what is under way and drop what the worker alone had: it has ended."""
        if self._metrics is not None:
            self._metrics.close()
        if self._bls is not None:
            self._bls.close()
        self._bls = self._metrics = None
        self._send = _ignore  # it belongs to whoever has this


def _ignore(header: Header, packer: Packer | None) -> None:
    """Take the place of what writes to a worker that has ended."""
