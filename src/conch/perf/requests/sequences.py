"""Sequences: which request of which sequence a caller sends next, and how requests say so.

Pure.  Each caller has one sequence at a time and one request of it at a time, as stateful models want it; its id is
used by nobody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from conch.perf.requests.payload import Payload

_ID_BITS: Final = 63
#: Field 4 of ``ModelInferRequest`` (``parameters``), and the fields of its entries.
_PARAMETER, _KEY, _VALUE, _BOOL, _INT64 = 0x22, 0x0A, 0x12, 0x08, 0x10


def json_fields(identity: int, *, start: bool = False, end: bool = False) -> bytes:
    """Members of a request's parameters in JSON, always as many bytes."""
    shown = [f"{one!s:>5}".lower() for one in (start, end)]
    return f'"sequence_id":{identity:20d},"sequence_start":{shown[0]},"sequence_end":{shown[1]}'.encode()


def grpc_fields(identity: int, *, start: bool = False, end: bool = False) -> bytes:
    """The same as entries of ``ModelInferRequest.parameters``, always as many bytes."""
    varint = bytes([identity >> shift & 0x7F | 0x80 for shift in range(0, _ID_BITS - 7, 7)])
    varint += bytes([identity >> (_ID_BITS - 7) & 0x7F])
    flags = [_entry(name, bytes([_BOOL, one])) for name, one in ((b"sequence_start", start), (b"sequence_end", end))]
    return b"".join([_entry(b"sequence_id", bytes([_INT64]) + varint), *flags])


def _entry(name: bytes, value: bytes) -> bytes:
    inner = bytes([_KEY, len(name)]) + name + bytes([_VALUE, len(value)]) + value
    return bytes([_PARAMETER, len(inner)]) + inner


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """``streams`` are the numbers of the payloads that follow one another; a sequence has one of them, in turn.

    A sequence is ``length`` long, give or take ``variation`` of it (0.2 is 20 %), and as long as its stream where
    ``length`` is 0.  Ids begin at ``first`` and end before ``last``, 0 for no end; ``form`` is how requests say them.
    """

    streams: Sequence[Sequence[int]]
    form: Literal["json", "grpc"]
    length: int = 0
    variation: float = 0.2
    first: int = 1
    last: int = 0


@dataclass(slots=True)
class _Running:
    identity: int
    stream: Sequence[int]
    length: int
    sent: int = 0


class SequenceSource:
    """The sequences of one of ``count`` processes that send, ``number``; callers are known by their slots."""

    def __init__(self, plan: SequencePlan, number: int = 0, count: int = 1) -> None:
        self._plan = plan
        self._step = count
        self._first = plan.first + number
        self._next_id = self._first
        self._next_stream = number
        self._random = Random(number)
        self._running: dict[int, _Running] = {}

    def take(self, slot: int, payloads: Sequence[Payload]) -> tuple[int, Payload]:
        """The number of the payload that a caller sends now, and the payload as it is sent."""
        running = self._running.get(slot)
        if running is None:
            running = self._running[slot] = self._begin()
        number = running.stream[running.sent % len(running.stream)]
        running.sent += 1
        fields = json_fields if self._plan.form == "json" else grpc_fields
        start, end = running.sent == 1, running.sent >= running.length
        return number, payloads[number].with_fields(fields(running.identity, start=start, end=end))

    def ended(self, slot: int, *, well: bool, lost: bool) -> None:
        """A caller has its answer: one that failed at the start, or with its connection, has no sequence any more."""
        running = self._running[slot]
        if lost or running.sent >= running.length or (running.sent == 1 and not well):
            del self._running[slot]

    def finish(self, slot: int) -> bool:
        """Let a caller's next request be the last of its sequence; returns whether there is one to be sent."""
        running = self._running.get(slot)
        if running is not None:
            running.length = running.sent + 1
        return running is not None

    def _begin(self) -> _Running:
        plan = self._plan
        stream = plan.streams[self._next_stream % len(plan.streams)]
        self._next_stream += self._step
        length = len(stream)
        if plan.length:
            length = max(1, round(plan.length * (1 + self._random.uniform(-plan.variation, plan.variation))))
        return _Running(self._free_id(), stream, length)

    def _free_id(self) -> int:
        used = {one.identity for one in self._running.values()}
        while True:
            found = self._next_id
            self._next_id += self._step
            if self._plan.last and self._next_id >= self._plan.last:
                self._next_id = self._first
            if found not in used:
                return found
