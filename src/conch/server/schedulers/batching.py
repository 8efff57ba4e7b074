"""Decides which waiting requests run next and when: one request at a time, or batched dynamically.

Pure: :meth:`Scheduler.take` takes the time and returns the batch to run now and when to call it again.
Source: Triton's dynamic batcher (preferred sizes, queue delay, closing a batch by shapes and optional inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from conch.core.errors import ConchError
from conch.core.inference import InferRequest, ModelSignature, ignore
from conch.server.schedulers.queue import NS_PER_US, QueuedRequest, RequestQueue


@dataclass(slots=True)
class BatchDecision:
    """A batch to run now (may be empty), and when to call again (ns); 0 means after the next change.

    ``instance`` is the key of the instance that runs it.
    """

    batch: list[InferRequest]
    wake_at: int = 0
    instance: str = ""


_NOTHING: Final = BatchDecision([])


class WaitingRequests(Protocol):
    """The queued requests of a model; its length is their number."""

    def __len__(self) -> int: ...

    def add(self, request: InferRequest, now: int) -> None: ...

    def drain(self) -> list[InferRequest]: ...


class Scheduler:
    """Decides for the dispatcher of a model which requests run next; ``queue`` has the waiting requests.

    The defaults fit requests that do not belong to sequences: any instance can run them.
    """

    queue: WaitingRequests
    #: Whether models may reschedule requests.
    iterative = False
    #: Whether ``done`` takes requests that a worker has begun and not completed, to run them after others.
    continues_unfinished = False
    #: Whether a batch must not start before the responses of the previous batch are delivered.
    stateful = False
    #: Called when a cancellation may have unblocked other requests.
    on_cancelled: Callable[[], None] = ignore

    def take(self, now: int) -> BatchDecision:
        """Return the next batch."""
        raise NotImplementedError

    def assign(self, free: Collection[str], now: int) -> BatchDecision:
        """Return the next batch for one of the ``free`` instances, and this instance."""
        if not free or not len(self.queue):
            return _NOTHING
        decision = self.take(now)
        decision.instance = next(iter(free))
        return decision

    def eager(self, free: Collection[str]) -> Collection[str]:
        """Return those of the ``free`` instances that could run waiting requests, now or after their queue delay."""
        return free if len(self.queue) else ()

    def add_instance(self, key: str, now: int) -> None:
        """Add an instance that has started or restarted."""

    def done(self, key: str, now: int, again: Collection[InferRequest] = ()) -> None:
        """Record that an instance has ended its batch; ``again`` are the requests that run again."""

    def retire(self, key: str) -> bool:
        """Give an instance no new sequences; return whether it has none left."""
        return True

    def lose(self, key: str, error: ConchError, now: int) -> None:
        """Remove an instance; its sequences, if any are left, end with ``error``."""

    @property
    def live(self) -> int:
        """Number of sequences that are active or wait for a slot."""
        return 0

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence."""
        return False

    def note_replaced(self) -> None:
        """Record that another version now receives requests."""


class DirectScheduler(Scheduler):
    """Runs each request on its own, with its own batch dimension, by priority and then in order of arrival."""

    queue: RequestQueue

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue

    def take(self, now: int) -> BatchDecision:
        first = next(self.queue.in_order(now), None)
        if first is None:
            return BatchDecision([])
        return BatchDecision(self.queue.take([first]))


class DynamicBatcher(Scheduler):
    """Batches requests up to ``max_batch_size`` rows, waiting at most ``max_delay_us`` for more.

    As soon as the waiting requests reach a ``preferred`` size (rows), a batch of the largest preferred size that they
    can form runs. Without a delay, a batch contains the requests that wait when an instance is free. If a request would
    exceed the largest preferred size before any preferred size is reached, the requests before it run without it.
    """

    queue: RequestQueue

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


class HeldScheduler(Scheduler):
    """Holds all requests until ``count`` of them wait at once, then passes through to ``scheduler``.

    Source: Triton's ``TRITONSERVER_DELAY_SCHEDULER``, for tests in which the first batches must not depend on timing.
    """

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.queue = scheduler.queue
        self.continues_unfinished = scheduler.continues_unfinished
        self._scheduler = scheduler
        self._count = count

    def take(self, now: int) -> BatchDecision:
        return BatchDecision([]) if self._holds() else self._scheduler.take(now)

    def assign(self, free: Collection[str], now: int) -> BatchDecision:
        return BatchDecision([]) if self._holds() else self._scheduler.assign(free, now)

    def _holds(self) -> bool:
        if len(self.queue) < self._count:
            return True
        self._count = 0
        return False

    def eager(self, free: Collection[str]) -> Collection[str]:
        return self._scheduler.eager(free)

    def done(self, key: str, now: int, again: Collection[InferRequest] = ()) -> None:
        self._scheduler.done(key, now, again)

    def retire(self, key: str) -> bool:
        return self._scheduler.retire(key)

    def lose(self, key: str, error: ConchError, now: int) -> None:
        self._scheduler.lose(key, error, now)
