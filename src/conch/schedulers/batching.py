"""Which waiting requests run next, and when: one at a time, or batched dynamically.

Pure: :meth:`Batcher.take` is given the time and says what to run now and when to ask again.
Source: Triton's dynamic batcher (preferred sizes, queue delay, shape and optional-input closing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from conch.inference import InferRequest, ModelSignature
from conch.schedulers.queue import NS_PER_US, QueuedRequest, RequestQueue


@dataclass(slots=True)
class BatchDecision:
    """A batch to run now (may be empty) and the moment (ns) to ask again; 0 means after the next change."""

    batch: list[InferRequest]
    wake_at: int = 0


class Scheduler(Protocol):
    """What the dispatcher of a model asks."""

    queue: RequestQueue

    def take(self, now: int) -> BatchDecision: ...


class DirectScheduler:
    """Each request is one execution, with the batch that it brings; by priority, then in order of arrival."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue

    def take(self, now: int) -> BatchDecision:
        first = next(self.queue.in_order(now), None)
        if first is None:
            return BatchDecision([])
        return BatchDecision(self.queue.take([first]))


class DynamicBatcher:
    """Collects requests up to ``max_batch_size``, waiting at most ``max_delay_us`` for more.

    ``preferred`` sizes are executed as soon as they are reached; without delay a batch is whatever
    waits when an instance is free.
    """

    def __init__(
        self,
        queue: RequestQueue,
        signature: ModelSignature,
        *,
        preferred: tuple[int, ...] = (),
        max_delay_us: int = 0,
    ) -> None:
        self.queue = queue
        self._max_batch_size = max(signature.max_batch_size, 1)
        self._preferred = frozenset(preferred)
        self._largest_preferred = max(preferred, default=0)
        self._max_delay = max_delay_us * NS_PER_US
        self._optional = any(spec.optional for spec in signature.inputs.values())
        self._variable = tuple(spec.name for spec in signature.inputs.values() if -1 in spec.dims and not spec.ragged)

    def take(self, now: int) -> BatchDecision:
        chosen: list[QueuedRequest] = []
        total = 0
        at_preferred = 0
        closed = False
        for waiting in self.queue.in_order(now):
            total_then = total + waiting.request.batch_size
            if total_then > self._max_batch_size or (chosen and not self._fits(chosen[0].request, waiting.request)):
                closed = True
                break
            if at_preferred and total_then > self._largest_preferred:
                break
            chosen.append(waiting)
            total = total_then
            if total in self._preferred:
                at_preferred = len(chosen)
        if not chosen:
            return BatchDecision([])

        oldest = min(waiting.queued for waiting in chosen)
        overdue = self._max_delay > 0 and now - oldest >= self._max_delay
        if at_preferred and not overdue:
            return BatchDecision(self.queue.take(chosen[:at_preferred]))
        if closed or overdue or not self._max_delay or (self._preferred and total >= self._largest_preferred):
            return BatchDecision(self.queue.take(chosen))
        deadline = self.queue.next_deadline()
        wake_at = oldest + self._max_delay
        return BatchDecision([], min(wake_at, deadline) if deadline else wake_at)

    def _fits(self, first: InferRequest, other: InferRequest) -> bool:
        """Whether both may share a batch: the same inputs present, and the same variable dimensions."""
        if self._optional and first.inputs.keys() != other.inputs.keys():
            return False
        return all(ours == theirs for ours, theirs in zip(self._shapes(first), self._shapes(other), strict=True))

    def _shapes(self, request: InferRequest) -> Iterator[tuple[int, ...] | None]:
        for name in self._variable:
            tensor = request.inputs.get(name)
            yield tensor.shape[1:] if tensor is not None else None
