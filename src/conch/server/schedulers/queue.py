"""The queue of requests that wait for an instance: priority levels, queue policies and timeouts.

A pure state machine: times are passed in (``monotonic_ns``) and nothing sleeps; it only responds to requests that time
out or are cancelled. Each loaded model version has a queue, on the event loop. Source: Triton's ``ModelQueuePolicy``
and dynamic batcher.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from conch.core.errors import QUEUE_FULL, Code, ConchError, cancelled, unavailable
from conch.core.inference import InferRequest

NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The timeouts and the size limit of a priority level; ``max_queue_size`` 0 means no limit.

    With ``delay_when_late``, late requests run after all others of their level instead of being refused.
    """

    max_queue_size: int = 0
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    delay_when_late: bool = False

    def deadline(self, request: InferRequest, now: int) -> int:
        """Return when a request becomes late (ns), 0 for never.

        The timeout of the request applies if it is shorter than the default and overrides are allowed.
        """
        timeout = self.default_timeout_us
        if self.allow_timeout_override and 0 < request.timeout < timeout:
            timeout = request.timeout
        return now + timeout * NS_PER_US if timeout else 0

    def client_deadline(self, request: InferRequest, now: int) -> int:
        """Return the client's deadline of a request, in the queue and in the model (ns); 0 for none.

        Triton, in contrast, ignores the timeout once a request runs. As in Triton, a policy without a default timeout
        cannot be overridden.
        """
        client = self.allow_timeout_override and self.default_timeout_us and not self.delay_when_late
        return now + request.timeout * NS_PER_US if client and request.timeout else 0


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue; times in ns, ``deadline`` 0 means none; ``level`` 1 has the highest priority."""

    request: InferRequest
    queued: int
    deadline: int
    level: int = 1


class _Level:
    """A priority level: ``timely`` requests run first, then ``late`` ones that are delayed instead of refused.

    A level that is not ``lasting`` is removed when it is empty.
    """

    def __init__(self, number: int, policy: QueuePolicy, *, lasting: bool) -> None:
        self.number = number
        self.policy = policy
        self.lasting = lasting
        self.timely: deque[QueuedRequest] = deque()
        self.late: deque[QueuedRequest] = deque()
        self.size = 0
        self.earliest = 0  # lower bound of the deadlines in ``timely`` (ns); 0 if there are none
        self.stale = False  # whether the deques contain requests that have ended

    def append(self, waiting: QueuedRequest) -> None:
        self.timely.append(waiting)
        self.size += 1
        if waiting.deadline and (not self.earliest or waiting.deadline < self.earliest):
            self.earliest = waiting.deadline

    def sort_out(self, now: int) -> list[InferRequest]:
        """Drop ended requests, and delay late ones or remove and return them, according to the policy."""
        late_now = bool(self.earliest) and now >= self.earliest
        if not (self.stale or late_now):
            return []
        refused: list[InferRequest] = []
        timely: deque[QueuedRequest] = deque()
        for entry in self.timely:
            if entry.request.finished:
                continue
            if not entry.deadline or now < entry.deadline:
                timely.append(entry)
            elif self.policy.delay_when_late:
                self.late.append(entry)
            else:
                refused.append(entry.request)
        self.timely = timely
        self.size -= len(refused)
        self.forget_ended()
        return refused

    def forget_ended(self) -> None:
        """Drop requests that have ended while they waited."""
        self.timely = deque(entry for entry in self.timely if not entry.request.finished)
        self.late = deque(entry for entry in self.late if not entry.request.finished)
        self.earliest = min((entry.deadline for entry in self.timely if entry.deadline), default=0)
        self.stale = False


class RequestQueue:
    """A queue that is FIFO within each priority level, level 1 first.

    ``limit`` bounds the whole queue regardless of the policies, so that overload fails at once and memory stays
    bounded. A request that is cancelled while it waits fails here. There may be 2**64 levels; only levels with requests
    or with their own policy are stored.
    """

    def __init__(
        self,
        policy: QueuePolicy | None = None,
        *,
        levels: int = 0,
        default_level: int = 0,
        level_policies: Mapping[int, QueuePolicy] | None = None,
        limit: int = 0,
    ) -> None:
        self._policy = policy or QueuePolicy()
        self._highest = max(levels, 1)
        self._default = min(max(default_level, 1), self._highest)  # without levels, ``default_level`` has no effect
        self._limit = limit
        self._size = 0
        # Without levels, their policies have no effect either.
        lasting = {self._default: self._policy, **((level_policies or {}) if levels else {})}
        self._by_number = {number: _Level(number, of, lasting=True) for number, of in sorted(lasting.items())}
        self._levels = [*self._by_number.values()]  # in the order of their numbers
        self._lasting = len(self._levels)

    def __len__(self) -> int:
        return self._size

    @property
    def levels(self) -> list[int]:
        """The numbers of the stored levels, in their order."""
        return [level.number for level in self._levels]

    def add(self, request: InferRequest, now: int) -> None:
        """Append a request to its level; raises UNAVAILABLE if the level or the queue is full."""
        number = self._number_of(request)
        if self._limit and self._size >= self._limit:
            raise _full(request)  # before a level is created for it
        level = self._by_number.get(number) or self._new_level(number)
        policy = level.policy
        if policy.max_queue_size and level.size >= policy.max_queue_size:
            raise _full(request)
        request.times.queued = now
        request.priority = number
        request.on_cancel = self._cancelled
        deadline = policy.deadline(request, now)
        request.start_deadline = 0 if policy.delay_when_late else deadline
        request.deadline = policy.client_deadline(request, now) if request.timeout else 0
        level.append(QueuedRequest(request, now, deadline, number))
        self._size += 1

    def in_order(self, now: int) -> Iterator[QueuedRequest]:
        """Yield the requests that may run, in order, after late ones have been refused or delayed."""
        # All levels first, because the end of a request may cancel others (of the same ensemble) in any level.
        while refused := [request for level in self._levels for request in level.sort_out(now)]:
            self._size -= len(refused)
            for request in refused:
                request.on_cancel = None
            for request in refused:
                request.fail(unavailable("Request timeout expired"))
        if len(self._levels) > self._lasting:
            self._forget_empty()
        for level in self._levels:
            yield from level.timely
            yield from level.late

    def take(self, chosen: list[QueuedRequest]) -> list[InferRequest]:
        """Remove and return ``chosen``, which must be the first requests that :meth:`in_order` yielded."""
        for waiting in chosen:
            level = self._level_of(waiting.request)
            (level.timely if level.timely and level.timely[0] is waiting else level.late).popleft()
            level.size -= 1
            waiting.request.on_cancel = None
        self._size -= len(chosen)
        return [waiting.request for waiting in chosen]

    def remove(self, chosen: Collection[InferRequest]) -> None:
        """Remove requests from any position in the queue, to run them."""
        identities = set(map(id, chosen))
        for level in {id(level): level for level in map(self._level_of, chosen)}.values():
            before = len(level.timely) + len(level.late)
            level.timely = deque(entry for entry in level.timely if id(entry.request) not in identities)
            level.late = deque(entry for entry in level.late if id(entry.request) not in identities)
            level.size -= before - len(level.timely) - len(level.late)
        self._size -= len(chosen)
        for request in chosen:
            request.on_cancel = None

    def next_deadline(self) -> int:
        """Return when the next waiting request becomes late (ns, possibly too early), 0 for never."""
        return min((level.earliest for level in self._levels if level.earliest), default=0)

    def drain(self) -> list[InferRequest]:
        """Remove and return all requests, for a model that can no longer run any."""
        requests = []
        for level in self._levels:
            requests += [entry.request for entry in (*level.timely, *level.late) if not entry.request.finished]
            level.timely.clear()
            level.late.clear()
            level.size = 0
            level.earliest = 0
            level.stale = False
        self._size = 0
        for request in requests:
            request.on_cancel = None
        return requests

    def _level_of(self, request: InferRequest) -> _Level:
        return self._by_number[request.priority]

    def _number_of(self, request: InferRequest) -> int:
        priority = request.priority
        return priority if 0 < priority <= self._highest else self._default

    def _new_level(self, number: int) -> _Level:
        level = self._by_number[number] = _Level(number, self._policy, lasting=False)
        insort(self._levels, level, key=attrgetter("number"))
        return level

    def _forget_empty(self) -> None:
        self._levels = [level for level in self._levels if level.size or level.lasting]
        self._by_number = {level.number: level for level in self._levels}

    def _cancelled(self, request: InferRequest) -> None:
        level = self._level_of(request)
        level.stale = True
        level.size -= 1
        self._size -= 1
        request.fail(cancelled())
        # Without an instance, ``in_order`` may not be called for a while; ended requests must not accumulate.
        if not (level.size or level.lasting):
            self._forget_empty()
        elif len(level.timely) + len(level.late) > 2 * level.size + 16:
            level.forget_ended()


def _full(request: InferRequest) -> ConchError:
    return request.error(QUEUE_FULL, Code.UNAVAILABLE)
