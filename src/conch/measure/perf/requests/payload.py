"""Encoded requests and their sequence fields, the interface between encoders and senders. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

#: The smallest number of a text; all numbers have as many digits.
_FIRST_NUMBER: Final = 100_000


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded request: a whole HTTP request, or a gRPC message with its prefix.

    ``inferences`` is its batch size. ``fields_at`` is the offset of its sequence fields (bytes, -1: none).
    ``number_at`` is the offset of the number at the start of its text (bytes, -1: none), which senders change so that
    no two requests are equal.
    """

    data: bytes
    inferences: int = 1
    fields_at: int = -1
    number_at: int = -1

    def with_fields(self, fields: bytes) -> Payload:
        """Return the request with other sequence fields, which have the same size."""
        at = self.fields_at
        return Payload(self.data[:at] + fields + self.data[at + len(fields) :], self.inferences, at)

    def numbered(self, number: int) -> Payload:
        """Return the request with another number in its text."""
        at = self.number_at
        digits = b"%d" % (_FIRST_NUMBER + number % (9 * _FIRST_NUMBER))
        return Payload(self.data[:at] + digits + self.data[at + len(digits) :], self.inferences, number_at=at)


Payloads = Sequence[Payload]


# Each caller has one sequence at a time and one request of it in flight, as stateful models require. No two running
# sequences share a correlation ID.


_ID_BITS: Final = 63
#: Field 4 of ``ModelInferRequest`` (``parameters``), and the fields of its entries.
_PARAMETER, _KEY, _VALUE, _BOOL, _INT64 = 0x22, 0x0A, 0x12, 0x08, 0x10


def json_fields(identity: int, *, start: bool = False, end: bool = False) -> bytes:
    """Return the sequence parameters as JSON members of constant length."""
    shown = [f"{flag!s:>5}".lower() for flag in (start, end)]
    return f'"sequence_id":{identity:20d},"sequence_start":{shown[0]},"sequence_end":{shown[1]}'.encode()


def grpc_fields(identity: int, *, start: bool = False, end: bool = False) -> bytes:
    """Return the sequence parameters as entries of ``ModelInferRequest.parameters`` of constant length."""
    varint = bytes([identity >> shift & 0x7F | 0x80 for shift in range(0, _ID_BITS - 7, 7)])
    varint += bytes([identity >> (_ID_BITS - 7) & 0x7F])
    flags = [_entry(name, bytes([_BOOL, flag])) for name, flag in ((b"sequence_start", start), (b"sequence_end", end))]
    return b"".join([_entry(b"sequence_id", bytes([_INT64]) + varint), *flags])


def _entry(name: bytes, value: bytes) -> bytes:
    inner = bytes([_KEY, len(name)]) + name + bytes([_VALUE, len(value)]) + value
    return bytes([_PARAMETER, len(inner)]) + inner


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The sequences to send; each sequence uses one of the ``streams``, lists of payload numbers, in rotation.

    The length of a sequence is ``length``, varied by the fraction ``variation`` (0.2 is 20 %), or that of its stream if
    ``length`` is 0. Correlation IDs begin at ``first`` and end before ``last`` (0: no end). ``form`` is the encoding of
    the parameters.
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
    """The sequences of sending process ``number`` of ``count``; callers are identified by their slots."""

    def __init__(self, plan: SequencePlan, number: int = 0, count: int = 1) -> None:
        self._plan = plan
        self._step = count
        self._first = plan.first + number
        self._next_id = self._first
        self._next_stream = number
        self._random = Random(number)
        self._running: dict[int, _Running] = {}

    def take(self, slot: int, payloads: Sequence[Payload]) -> tuple[int, Payload]:
        """Return the number of a caller's next payload, and the payload with its sequence parameters."""
        running = self._running.get(slot)
        if running is None:
            running = self._running[slot] = self._begin()
        number = running.stream[running.sent % len(running.stream)]
        running.sent += 1
        fields = json_fields if self._plan.form == "json" else grpc_fields
        start, end = running.sent == 1, running.sent >= running.length
        return number, payloads[number].with_fields(fields(running.identity, start=start, end=end))

    def ended(self, slot: int, *, well: bool, lost: bool) -> None:
        """Record a response; the caller's sequence ends if complete, failed at its start, or without its connection."""
        running = self._running[slot]
        if lost or running.sent >= running.length or (running.sent == 1 and not well):
            del self._running[slot]

    def finish(self, slot: int) -> bool:
        """Make a caller's next request the last of its sequence; return whether there is such a request."""
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
        used = {sequence.identity for sequence in self._running.values()}
        while True:
            candidate = self._next_id
            self._next_id += self._step
            if self._plan.last and self._next_id >= self._plan.last:
                self._next_id = self._first
            if candidate not in used:
                return candidate
