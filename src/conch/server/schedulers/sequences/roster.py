"""The active sequences of a model and the slots of its instances, each with one sequence at a time.

The roster finds sequences by correlation ID, by idle time, and in the backlog. Used by the sequence scheduler; pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from conch.core.errors import ConchError
from conch.core.inference import InferRequest
from conch.server.schedulers.queue import NS_PER_US
from conch.server.schedulers.sequences.inputs import State

#: Maximum idle time of a sequence of a replaced version while other sequences wait for a slot (ns).
_REPLACED_IDLE: Final = 1_000_000_000


@dataclass(slots=True, eq=False)
class LiveSequence:
    """An active sequence, from its first request to its last; it has a slot or waits for one.

    ``closed`` is True if no more requests may join it, because it had its last request, was cancelled or was removed.
    ``last`` is the time of its last activity (ns), ``deadline`` that of its wait for a slot (ns, 0 for none).
    """

    id: int | str
    state: State
    waiting: deque[InferRequest] = field(default_factory=deque)
    #: Number of its requests that an instance has.
    running: int = 0
    slot: Slot | None = None
    closed: bool = False
    last: int = 0
    deadline: int = 0
    #: The request that an iterative model runs again.
    repeated: InferRequest | None = None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


@dataclass(slots=True, eq=False)
class Slot:
    """A slot for one sequence; ``number`` is its row in the batch.

    ``in_flight`` is the request that its instance has, from this sequence or from the previous one.
    """

    instance: InstanceSlots
    number: int
    sequence: LiveSequence | None = None
    in_flight: InferRequest | None = None
    #: The sequence of ``in_flight``.
    owner: LiveSequence | None = None

    def begin(self, request: InferRequest, sequence: LiveSequence) -> None:
        """Record that the instance has been given ``request``."""
        self.in_flight, self.owner = request, sequence
        sequence.running += 1

    def finish(self) -> LiveSequence | None:
        """Clear the in-flight request, if any, when it has completed; return its sequence."""
        owner, self.in_flight, self.owner = self.owner, None, None
        if owner is not None:
            owner.running -= 1
        return owner


class InstanceSlots:
    """The slots of the instance ``key``, which runs one batch at a time.

    ``accepting`` is False if it gets no new sequences, because it has died or is being retired.
    """

    def __init__(self, key: str, count: int, order: int) -> None:
        self.key = key
        self.order = order
        self.slots = [Slot(self, number) for number in range(count)]
        self.accepting = True
        self.busy = False

    @property
    def vacant(self) -> bool:
        """Whether it has no sequences and no requests."""
        return not self.busy and all(slot.sequence is None and slot.in_flight is None for slot in self.slots)

    @property
    def eager(self) -> bool:
        """Whether it is not busy and has waiting requests."""
        return not self.busy and any(
            slot.in_flight is not None or (slot.sequence is not None and slot.sequence.waiting) for slot in self.slots
        )


class SequenceRoster:
    """Tracks all sequences and waiting requests; sequences that are idle for ``max_idle`` (ns) end."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._replaced = False
        #: Sequences that further requests may join, by correlation ID.
        self._open: dict[int | str, LiveSequence] = {}
        #: Sequences without a slot, in order of arrival.
        self.backlog: dict[LiveSequence, None] = {}
        #: Sequences with a slot, in the order in which they expire when idle.
        self.settled: OrderedDict[LiveSequence, None] = OrderedDict()
        #: Sequences that ended with their instance before their clients received an error: error and deadline (ns).
        self._lost: OrderedDict[int | str, tuple[ConchError, int]] = OrderedDict()
        #: The sequence of each waiting request, by serial number.
        self.waiting: dict[int, LiveSequence] = {}
        #: Lower bound of the deadlines in the backlog (ns); 0 if there are none.
        self._first_deadline = 0

    def find(self, id: int | str) -> LiveSequence | None:
        """Return the sequence that a request with this correlation ID joins."""
        return self._open.get(id)

    def open(self, sequence: LiveSequence) -> None:
        """Add a new sequence, which is in the backlog until it is settled."""
        self._open[sequence.id] = sequence
        self.backlog[sequence] = None

    def settle(self, sequence: LiveSequence, now: int) -> None:
        """Move a sequence that has been given a slot out of the backlog."""
        del self.backlog[sequence]
        self.settled[sequence] = None
        sequence.last = now

    def append(self, sequence: LiveSequence, request: InferRequest, now: int) -> None:
        """Append a waiting request to its sequence."""
        request.times.queued = now
        sequence.waiting.append(request)
        self.waiting[request.serial] = sequence
        if sequence in self.settled:
            self.touch(sequence, now)
        elif request.timeout:
            late = now + request.timeout * NS_PER_US
            sequence.deadline = min(sequence.deadline or late, late)
            self._first_deadline = min(self._first_deadline or late, late)

    def touch(self, sequence: LiveSequence, now: int) -> None:
        """Restart the idle time of a sequence at ``now``."""
        if sequence in self.settled:
            sequence.last = now
            self.settled.move_to_end(sequence)

    def close(self, sequence: LiveSequence) -> None:
        """Close a sequence: no further requests may join it."""
        sequence.closed = True
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]

    def cut(self, sequence: LiveSequence, doomed: Collection[InferRequest]) -> None:
        """Close a sequence and remove its ``doomed`` requests."""
        self.close(sequence)
        gone = {request.serial for request in doomed}
        for request in doomed:
            self.waiting.pop(request.serial, None)
            request.on_cancel = None
        kept = [request for request in sequence.waiting if request.serial not in gone]
        sequence.waiting.clear()
        sequence.waiting.extend(kept)
        self.backlog.pop(sequence, None)

    def forget(self, sequence: LiveSequence) -> list[InferRequest]:
        """End a sequence; return its waiting requests."""
        requests = list(sequence.waiting)
        self.cut(sequence, requests)
        self.settled.pop(sequence, None)
        return requests

    def late(self, now: int) -> list[InferRequest]:
        """End the sequences that have exceeded their timeout in the backlog; return their requests."""
        if not self._first_deadline or now < self._first_deadline:
            return []
        late = [sequence for sequence in self.backlog if sequence.deadline and sequence.deadline <= now]
        requests = [request for sequence in late for request in self.forget(sequence)]
        self._first_deadline = min((sequence.deadline for sequence in self.backlog if sequence.deadline), default=0)
        return requests

    def idle(self, now: int) -> Iterator[LiveSequence]:
        """End the settled sequences that have been idle for too long, and yield each."""
        while self.settled:
            sequence = next(iter(self.settled))
            if sequence.last + self._idle_limit() > now:
                return
            if sequence.idle:
                self.forget(sequence)
                yield sequence
            else:
                self.touch(sequence, now)

    def next_deadline(self) -> int:
        """Return when the next sequence expires, idle or in the backlog (ns, never too late); 0 for never."""
        first = next(iter(self.settled), None)
        idle = first.last + self._idle_limit() if first is not None else 0
        return min(idle, self._first_deadline) if idle and self._first_deadline else idle or self._first_deadline

    def note_replaced(self) -> None:
        """Record that another version now receives the requests, except for some that are still being decoded."""
        self._replaced = True

    def _idle_limit(self) -> int:
        """Return how long a settled sequence may be idle (ns)."""
        return min(self._max_idle, _REPLACED_IDLE) if self._replaced and self.backlog else self._max_idle

    def lose(self, sequence: LiveSequence, error: ConchError, now: int) -> None:
        """Store the error of a sequence that has ended, for ``max_idle``."""
        self._lost[sequence.id] = error, now + self._max_idle

    def loss(self, id: int | str, now: int) -> ConchError | None:
        """Return and remove the error of a lost sequence with this correlation ID; None if there is none."""
        while self._lost and next(iter(self._lost.values()))[1] <= now:
            self._lost.popitem(last=False)
        return self._lost.pop(id, (None, 0))[0]

    def forget_all(self, withdraw: Callable[[LiveSequence], list[InferRequest]]) -> list[InferRequest]:
        """End all sequences and return their waiting requests; ``withdraw`` takes back requests issued to a batch."""
        requests: list[InferRequest] = []
        for sequence in dict.fromkeys((*self.settled, *self.waiting.values(), *self.backlog)):
            requests += withdraw(sequence)
            requests += self.forget(sequence)
        self._lost.clear()
        self._first_deadline = 0
        return requests
