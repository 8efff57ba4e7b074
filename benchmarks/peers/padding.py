"""conch as it would be without batching by tokens: batches in arrival order, padded to their longest text.

    python -m benchmarks.peers.padding serve --model-repository=...

Everything else is conch's own, also that waiting texts are tokenised while others compute, so that a
comparison shows what grouping by length is worth. Models must say ``backend: "padding"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from conch.backends.base.backend_base import BackendBase
from conch.backends.huggingface import open_huggingface
from conch.backends.table import BACKENDS, Backend
from conch.backends.tasks.encoders import encoder_task
from conch.server.execution import scheduling
from conch.server.schedulers.batching import BatchDecision, Scheduler
from conch.server.schedulers.queue import RequestQueue
from conch.workers.child.channel import Channel, Header


class ArrivalOrder(Scheduler):
    """Takes what waits, oldest first, up to ``max_batch_size`` rows."""

    queue: RequestQueue

    def __init__(self, queue: RequestQueue, *, max_batch_size: int, **_: Any) -> None:
        self.queue = queue
        self._max_batch_size = max_batch_size

    def take(self, now: int) -> BatchDecision:
        batch: list[Any] = []
        rows = 0
        for waiting in self.queue.in_order(now):
            rows += waiting.request.batch_size
            if batch and rows > self._max_batch_size:
                break
            batch.append(waiting.request)
        self.queue.remove(batch)
        return BatchDecision(batch)


def one_run(lengths: Sequence[int], **_: Any) -> list[list[int]]:
    """All sequences in one run, the longest first."""
    return [sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)]


def replace(module: ModuleType, name: str, value: Any) -> None:
    """Put ``value`` in the place of what ``module`` uses; AttributeError when it no longer uses it."""
    getattr(module, name)
    setattr(module, name, value)


def open_padding(channel: Channel, init: Header) -> BackendBase:
    """conch's backend, whose tasks compute a batch in one run; what the worker calls to make it."""
    replace(encoder_task, "runs", one_run)
    return open_huggingface(channel, init)


def main() -> None:
    from conch.cli import main

    BACKENDS["padding"] = Backend("benchmarks.peers.padding:open_padding", shared=True, prepares=True)
    replace(scheduling, "TokenBatcher", ArrivalOrder)
    main()


if __name__ == "__main__":
    main()
