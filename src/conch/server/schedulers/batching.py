"""Decides which waiting requests run next and when: one request at a time, or batched dynamically.

Pure: :meth:`Scheduler.take` takes the time and returns the batch to run now and when to call it again.
Source: Triton's dynamic batcher (preferred sizes, queue delay, closing a batch by shapes and optional inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from conch.core.inference import InferRequest, ModelSignature
from conch.server.schedulers.queue import NS_PER_US, QueuedRequest, RequestQueue


@dataclass(slots=True)
class BatchDecision:
    """A batch to run now (may be empty), and when to call ``take`` again (ns); 0 means after the next change."""

    batch: list[InferRequest]
    wake_at: int = 0


class WaitingRequests(Protocol):
    """The queued requests of a model; its length is their number."""

    def __len__(self) -> int: ...

    def add(self, request: InferRequest, now: int) -> None: ...

    def drain(self) -> list[InferRequest]: ...


class Scheduler(Protocol):
    """Decides for the dispatcher of a model which requests run next."""

    @property
    def queue(self) -> WaitingRequests: ...

    def take(self, now: int) -> BatchDecision: ...


class DirectScheduler:
    """Runs each request on its own, with its own batch dimension, by priority and then in order of arrival."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue

    def take(self, now: int) -> BatchDecision:
        first = next(self.queue.in_order(now), None)
        if first is None:
            return BatchDecision([])
        return BatchDecision(self.queue.take([first]))


class DynamicBatcher:
    """Batches requests up to ``max_batch_size`` rows, waiting at most ``max_delay_us`` for more.

    As soon as the waiting requests reach a ``preferred`` size (rows), a batch of the largest preferred size that they
    can form runs. Without a delay, a batch contains the requests that wait when an instance is free. If a request would
    exceed the largest preferred size before any preferred size is reached, the requests before it run without it.
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
        self._preferred = frozenset(preferred) or frozenset([self._max_batch_size])
        self._largest_preferred = max(self._preferred)
        self._max_delay = max_delay_us * NS_PER_US
        self._alone = DirectScheduler(queue)
        self._optional = any(spec.optional for spec in signature.inputs.values())
        self._variable = tuple(spec.name for spec in signature.inputs.values() if -1 in spec.dims and not spec.ragged)

    def take(self, now: int) -> BatchDecision:
        if not self._max_delay and len(self.queue) == 1:
            return self._alone.take(now)  # the common case under low load
        chosen: list[QueuedRequest] = []
        total = 0
        best = 0  # number of chosen requests that form the best preferred batch so far; 0 if none does
        closed = False
        largest, preferred = self._largest_preferred, self._preferred
        for waiting in self.queue.in_order(now):
            total_then = total + waiting.request.batch_size
            if chosen:
                if not best and total_then > largest:
                    best = len(chosen)
                if total_then > self._max_batch_size or not self._fits(chosen[0].request, waiting.request):
                    closed = True
                    break
            chosen.append(waiting)
            total = total_then
            if total in preferred:
                best = len(chosen)
        if not chosen:
            return BatchDecision([])

        oldest = min(waiting.queued for waiting in chosen)
        overdue = self._max_delay > 0 and now - oldest >= self._max_delay
        if best and not overdue:
            return BatchDecision(self.queue.take(chosen[:best]))
        if closed or overdue or not self._max_delay or total >= largest:
            return BatchDecision(self.queue.take(chosen))
        deadline = self.queue.next_deadline()
        wake_at = oldest + self._max_delay
        return BatchDecision([], min(wake_at, deadline) if deadline else wake_at)

    def _fits(self, first: InferRequest, other: InferRequest) -> bool:
        """Whether both requests may share a batch: same inputs present, same variable dimensions."""
        if self._optional and first.inputs.keys() != other.inputs.keys():
            return False
        return all(ours == theirs for ours, theirs in zip(self._shapes(first), self._shapes(other), strict=True))

    def _shapes(self, request: InferRequest) -> Iterator[tuple[int, ...] | None]:
        for name in self._variable:
            tensor = request.inputs.get(name)
            yield tensor.shape[1:] if tensor is not None else None


class HeldScheduler:
    """Holds all requests until ``count`` of them wait at once, then passes through to ``scheduler``.

    Source: Triton's ``TRITONSERVER_DELAY_SCHEDULER``, for tests in which the first batches must not depend on timing.
    """

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.queue = scheduler.queue
        self._scheduler = scheduler
        self._count = count

    def take(self, now: int) -> BatchDecision:
        if len(self.queue) < self._count:
            return BatchDecision([])
        self._count = 0
        return self._scheduler.take(now)
