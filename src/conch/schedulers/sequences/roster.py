"""The sequences of a model that are under way: by their ids, by how long they have been idle, and in the backlog.

Used by the scheduler, which knows their slots; pure like it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Final

from conch.errors import ConchError
from conch.inference import InferRequest
from conch.schedulers.queue import NS_PER_US
from conch.schedulers.sequences.slots import LiveSequence

#: How long a sequence of a replaced version may be idle before one of the backlog gets its slot (ns).
_REPLACED_IDLE: Final = 1_000_000_000


class SequenceRoster:
    """Knows each sequence and each waiting request; a sequence is idle for too long after ``max_idle`` (ns)."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._replaced = False
        #: Those that a further request may join, by their ids.
        self._open: dict[int | str, LiveSequence] = {}
        #: Those without a slot, in the order of their arrival.
        self.backlog: dict[LiveSequence, None] = {}
        #: Those with a slot, in the order in which they will have been idle for too long.
        self.settled: OrderedDict[LiveSequence, None] = OrderedDict()
        #: Those that ended with their instance and whose clients do not know it yet.
        self._lost: OrderedDict[int | str, tuple[ConchError, int]] = OrderedDict()
        #: Whose each waiting request is, by its serial number.
        self.waiting: dict[int, LiveSequence] = {}
        #: No sequence of the backlog expires before this (ns); 0 when none does.
        self._first_expiry = 0

    def find(self, id: int | str) -> LiveSequence | None:
        """The sequence that a request with this id joins."""
        return self._open.get(id)

    def open(self, sequence: LiveSequence) -> None:
        """Let requests join a sequence; it is in the backlog until it is settled."""
        self._open[sequence.id] = sequence
        self.backlog[sequence] = None

    def settle(self, sequence: LiveSequence, now: int) -> None:
        """A sequence has got a slot."""
        del self.backlog[sequence]
        self.settled[sequence] = None
        sequence.last = now

    def append(self, sequence: LiveSequence, request: InferRequest, now: int) -> None:
        """Let a request wait at the end of its sequence."""
        request.times.queued = now
        sequence.waiting.append(request)
        self.waiting[request.serial] = sequence
        if sequence in self.settled:
            self.touch(sequence, now)
        elif request.timeout:
            late = now + request.timeout * NS_PER_US
            sequence.expires = min(sequence.expires or late, late)
            self._first_expiry = min(self._first_expiry or late, late)

    def touch(self, sequence: LiveSequence, now: int) -> None:
        """Something has happened to a sequence: it is not idle before ``now``."""
        if sequence in self.settled:
            sequence.last = now
            self.settled.move_to_end(sequence)

    def close(self, sequence: LiveSequence) -> None:
        """Let no further request join a sequence."""
        sequence.closed = True
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]

    def cut(self, sequence: LiveSequence, doomed: Collection[InferRequest]) -> None:
        """Close a sequence that keeps only the requests that are not ``doomed``."""
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
        """End a sequence; returns the requests that waited for it."""
        requests = list(sequence.waiting)
        self.cut(sequence, requests)
        self.settled.pop(sequence, None)
        return requests

    def late(self, now: int) -> list[InferRequest]:
        """Forget what has been in the backlog for too long; returns its requests."""
        if not self._first_expiry or now < self._first_expiry:
            return []
        late = [sequence for sequence in self.backlog if sequence.expires and sequence.expires <= now]
        requests = [request for sequence in late for request in self.forget(sequence)]
        self._first_expiry = min((one.expires for one in self.backlog if one.expires), default=0)
        return requests

    def idle(self, now: int) -> Iterator[LiveSequence]:
        """Forget, one by one, the settled sequences that have had no request for too long."""
        while self.settled:
            sequence = next(iter(self.settled))
            if sequence.last + self._idle_limit() > now:
                return
            if sequence.idle:
                self.forget(sequence)
                yield sequence
            else:
                self.touch(sequence, now)

    def next_expiry(self) -> int:
        """When the next sequence will have been idle or in the backlog for too long (ns, never late); 0 for never."""
        first = next(iter(self.settled), None)
        idle = first.last + self._idle_limit() if first is not None else 0
        return min(idle, self._first_expiry) if idle and self._first_expiry else idle or self._first_expiry

    def note_replaced(self) -> None:
        """Requests go to another version, except some that are being decoded."""
        self._replaced = True

    def _idle_limit(self) -> int:
        """How long a settled sequence may be idle (ns)."""
        return min(self._max_idle, _REPLACED_IDLE) if self._replaced and self.backlog else self._max_idle

    def lose(self, sequence: LiveSequence, error: ConchError, now: int) -> None:
        """Remember why a sequence has ended, as long as it might have been idle."""
        self._lost[sequence.id] = error, now + self._max_idle

    def loss(self, id: int | str, now: int) -> ConchError | None:
        """Why the sequence with this id has ended, for whoever asks first."""
        while self._lost and next(iter(self._lost.values()))[1] <= now:
            self._lost.popitem(last=False)
        return self._lost.pop(id, (None, 0))[0]

    def forget_all(self, withdraw: Callable[[LiveSequence], list[InferRequest]]) -> list[InferRequest]:
        """End all sequences; ``withdraw`` takes back what a sequence has given away already.  Returns what waited."""
        requests: list[InferRequest] = []
        for sequence in dict.fromkeys((*self.settled, *self.waiting.values(), *self.backlog)):
            requests += withdraw(sequence)
            requests += self.forget(sequence)
        self._lost.clear()
        self._first_expiry = 0
        return requests
