"""Batches requests of similar length up to a budget of tokens.

Pure; see :mod:`conch.server.schedulers.batching` for the use of schedulers. Every batch contains the oldest request of
the highest priority, so that no request starves, and requests of the same priority and of similar length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice, takewhile
from typing import Final

from conch.core.errors import ConchError, cancelled
from conch.core.inference import InferRequest
from conch.core.lengths import runs
from conch.server.schedulers.batching import BatchDecision, Scheduler
from conch.server.schedulers.queue import NS_PER_US, RequestQueue

#: Number of waiting requests considered for a batch.
WINDOW: Final = 256
#: Estimated input bytes per token, for requests whose tokens no worker has counted yet.
_BYTES_PER_TOKEN: Final = 5


class TokenBatcher(Scheduler):
    """Forms batches of at most ``max_batch_tokens``, including padding, and ``max_batch_size`` rows.

    A batch that could still grow waits until it has ``minimum_rows`` or its oldest request has waited ``max_delay_us``.
    Without a delay, a batch contains the waiting requests that fit the oldest one when an instance is free.

    A worker may end a batch without having completed its requests, because others wait. Only the same instance can
    continue them. It alternates between waiting requests and those that it continues, so that a request which arrives
    does not wait for the rest of a large one, and the large one ends too.
    """

    queue: RequestQueue
    continues_unfinished = True

    def __init__(
        self,
        queue: RequestQueue,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        minimum_rows: int = 0,
        max_delay_us: int = 0,
    ) -> None:
        self.queue = queue
        self._minimum_rows = minimum_rows or max_batch_size
        self._max_batch_size = max_batch_size
        self._budget = max_batch_tokens
        self._max_delay = max_delay_us * NS_PER_US
        #: Requests to continue, by the key of the instance.
        self._unfinished: dict[str, deque[InferRequest]] = {}
        #: Instances whose last batch had to be continued: waiting requests come next.
        self._interrupted: set[str] = set()

    def assign(self, free: Collection[str], now: int) -> BatchDecision:
        continuing = [key for key in free if key in self._unfinished]
        if due := [key for key in continuing if key not in self._interrupted]:
            return self._continue(due[0])
        decision = super().assign(free, now)
        if decision.batch:
            self._interrupted.discard(decision.instance)
        elif continuing:
            return self._continue(continuing[0])
        return decision

    def eager(self, free: Collection[str]) -> Collection[str]:
        return super().eager(free) or [key for key in free if key in self._unfinished]

    def done(self, key: str, now: int, again: Collection[InferRequest] = ()) -> None:
        for request in again:
            if request.cancelled:
                request.fail(cancelled())
            elif not request.finished:
                request.on_cancel = self._cancel_unfinished
                self._unfinished.setdefault(key, deque()).append(request)
                self._interrupted.add(key)

    def retire(self, key: str) -> bool:
        return key not in self._unfinished

    def lose(self, key: str, error: ConchError, now: int) -> None:
        self._interrupted.discard(key)
        for request in self._unfinished.pop(key, ()):
            request.fail(error)

    def _continue(self, key: str) -> BatchDecision:
        """Return the next request for an instance to continue; the request may already have ended."""
        requests = self._unfinished[key]
        batch = [requests.popleft()]
        if not requests:
            del self._unfinished[key]
        return BatchDecision(batch, instance=key)

    def _cancel_unfinished(self, request: InferRequest) -> None:
        for key, requests in list(self._unfinished.items()):
            if request in requests:
                requests.remove(request)
            if not requests:
                del self._unfinished[key]
        request.fail(cancelled())

    def take(self, now: int) -> BatchDecision:
        in_order = self.queue.in_order(now)
        oldest = next(in_order, None)
        if oldest is None:
            return BatchDecision([])
        if len(self.queue) == 1 and now >= oldest.queued + self._max_delay:
            return BatchDecision(self.queue.take([oldest]))
        same_level = takewhile(lambda entry: entry.level == oldest.level, in_order)
        waiting = [oldest.request, *(entry.request for entry in islice(same_level, WINDOW - 1))]
        lengths = [_length(request) for request in waiting]
        counts = [max(request.sequences, request.batch_size) for request in waiting]
        divided = runs(lengths, budget=self._budget, limit=self._max_batch_size, counts=counts)
        chosen = next(run for run in divided if 0 in run)

        wake_at = oldest.queued + self._max_delay
        if now < wake_at and len(chosen) == len(waiting) and not self._is_full(chosen, lengths, counts):
            deadline = self.queue.next_deadline()
            return BatchDecision([], min(wake_at, deadline) if deadline else wake_at)
        batch = [waiting[index] for index in sorted(chosen)]
        self.queue.remove(batch)
        return BatchDecision(batch)

    def _is_full(self, chosen: list[int], lengths: list[int], counts: list[int]) -> bool:
        rows = sum(counts[index] for index in chosen)
        longest = max(lengths[index] for index in chosen)
        return rows >= self._minimum_rows or (rows + 1) * longest > self._budget


def _length(request: InferRequest) -> int:
    """Return the tokens of the longest sequence; estimated from the input size until a worker has counted them."""
    if request.length:
        return request.length
    size = sum(len(tensor.data) for tensor in request.inputs.values())
    return 1 + size // (_BYTES_PER_TOKEN * max(request.batch_size, 1))
