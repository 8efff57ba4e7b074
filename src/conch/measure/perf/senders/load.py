"""Starts requests: a constant number at a time (closed load), or at given times (open load).

In ``ClosedLoad``, each caller waits for its response before it sends the next request. ``OpenLoad`` starts requests
when they are due, independently of earlier ones. A request that has to wait for a free call counts from its due time,
so that a stalled server affects all requests that it would have delayed. Both run on the event loop of a sending
process. Due times come from a schedule, at constant, random (Poisson) or given intervals, in nanoseconds of the clock
of the start time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic_ns
from typing import Final

from conch.measure.perf.requests.payload import Payloads, SequenceSource
from conch.measure.perf.senders.records import CallChannel, Outcome, RecordBuffer, TimedCall, Unfinished


@dataclass(frozen=True, slots=True)
class Constant:
    """``rate`` requests per second at constant intervals."""

    rate: float

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end."""
        number = 0
        while True:
            # Computed from the start: a sum of intervals would accumulate rounding errors.
            yield start + int(number * 1e9 / self.rate)
            number += 1


@dataclass(frozen=True, slots=True)
class Poisson:
    """``rate`` requests per second on average, independent of each other: intervals are exponentially distributed."""

    rate: float
    seed: int = 0

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end; the same ones for the same seed."""
        random = Random(self.seed)
        moment = float(start)
        while True:
            moment += random.expovariate(self.rate) * 1e9
            yield int(moment)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Given intervals between requests (ns), repeated."""

    distances: Sequence[int]

    def moments(self, start: int) -> Iterator[int]:
        """Yield due times from ``start`` on, without end."""
        moment = start
        while True:
            for distance in self.distances:
                moment += distance
                yield moment


Schedule = Constant | Poisson | Intervals


def share_of(schedule: Schedule, start: int, number: int, count: int) -> Iterator[int]:
    """Yield every ``count``-th due time, beginning with number ``number``: the share of one of ``count`` processes."""
    for index, moment in enumerate(schedule.moments(start)):
        if index % count == number:
            yield moment


# Linux's timerfd if available; otherwise the timer of the event loop.


_MONOTONIC: Final = 1
_NON_BLOCKING_CLOSED_ON_EXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE: Final = 1


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval, and the first expiration."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class PreciseTimer:
    """Calls ``wake`` on the loop once, at the time of the last call of :meth:`at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        create = getattr(self._libc, "timerfd_create", None)
        self._fd = create(_MONOTONIC, _NON_BLOCKING_CLOSED_ON_EXEC) if create is not None else -1
        if self._fd >= 0:
            loop.add_reader(self._fd, self._readable)

    def at(self, moment: int) -> None:
        """Call ``wake`` at ``moment`` (ns, monotonic), or at once if that is in the past."""
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, moment - monotonic_ns()) / 1e9, self._wake)
            return
        times = _Times(0, 0, *divmod(max(1, moment), 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(times), None):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def _readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._wake()


#: Delay before a caller reconnects after a lost connection (s): the first one, and the longest.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0
#: Interval at which calls are checked for timeouts (s).
_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sending:
    """The parts that the loads of a process share: event loop, connections, payloads and records.

    Calls that take longer than ``timeout`` (s) are ended. ``numbers`` are inserted into payloads that have numbered
    texts.
    """

    loop: asyncio.AbstractEventLoop
    connect: Callable[[], CallChannel]
    payloads: Payloads
    records: RecordBuffer
    timeout: float
    numbers: Iterator[int]


class OfferedLoad:
    """Base of the loads: channels, the cycle of payloads, and the records of completed calls.

    ``sequences`` selects the next payload of a caller if requests belong to sequences. ``errors`` counts errors by
    message.
    """

    def __init__(self, sending: Sending, sequences: SequenceSource | None) -> None:
        self.errors: dict[str, int] = {}
        self._loop = sending.loop
        self._connect = sending.connect
        self._payloads = sending.payloads
        self._numbers = sending.numbers
        self._sequence_source = sequences
        self._records = sending.records
        self._timeout = int(sending.timeout * 1e9)
        self._channels: list[CallChannel] = []
        self._next = 0
        self._running: set[TimedCall] = set()
        self._loop.call_later(_CHECK_SECONDS, self._check_timeouts)

    def unfinished(self) -> Unfinished:
        """Return the requests in flight."""
        return Unfinished(len(self._running), min((call.due for call in self._running), default=0))

    def _begin(self, call: TimedCall, due: int, channel: CallChannel) -> None:
        call.begin(due)
        if self._sequence_source is None:
            call.number = number = self._next
            self._next = number + 1 if number + 1 < len(self._payloads) else 0
            payload = self._payloads[number]
            call.payload = payload if payload.number_at < 0 else payload.numbered(next(self._numbers))
        else:
            call.number, call.payload = self._sequence_source.take(call.slot, self._payloads)
        self._running.add(call)
        channel.send(call)

    def _note(self, call: TimedCall) -> None:
        """Add the record of a completed call."""
        self._running.discard(call)
        records = self._records
        if call.events:
            for moment in call.events:
                records.events.append(records.count)
                records.events.append(moment)
        records.count += 1
        records.rows.extend((
            call.due, call.sent, call.written, call.first, call.end, call.outcome, call.code, call.number,
            call.responses, call.tokens, call.received, call.slot,
        ))  # fmt: skip
        if self._sequence_source is not None:
            lost = call.outcome in (Outcome.CONNECTION_LOST, Outcome.TIMED_OUT)
            self._sequence_source.ended(call.slot, well=call.outcome is Outcome.OK, lost=lost)
        if call.error:
            self.errors[call.error] = self.errors.get(call.error, 0) + 1

    def _free_channel(self) -> CallChannel:
        for channel in self._channels:
            if channel.room > 0:
                return channel
        channel = self._connect()
        self._channels.append(channel)
        return channel

    def _check_timeouts(self) -> None:
        self._loop.call_later(_CHECK_SECONDS, self._check_timeouts)
        now = monotonic_ns()
        for call in [call for call in self._running if now - call.due > self._timeout]:
            assert call.channel is not None
            call.channel.cancel(call)
            call.finish(Outcome.TIMED_OUT, f"no response within {self._timeout / 1e9:g} s", end=now)


class ClosedLoad(OfferedLoad):
    """A load of ``concurrency`` callers, with slots numbered from ``first_slot``."""

    def __init__(self, sending: Sending, sequences: SequenceSource | None = None, first_slot: int = 0) -> None:
        super().__init__(sending, sequences)
        self._first_slot = first_slot
        self._calls: list[TimedCall] = []
        self._idle: set[TimedCall] = set()
        self._concurrency = 0
        #: Number of requests that may still start; None: no limit.
        self._left: int | None = None
        self._pauses: dict[TimedCall, float] = {}

    def run(self, concurrency: int, requests: int | None = None) -> None:
        """Set the number of callers; together they start at most ``requests`` requests (None: no limit).

        Surplus callers stop after their current response, or at the end of their sequence.
        """
        self._concurrency = concurrency
        self._left = requests
        idle, self._idle = self._idle, set()
        for call in sorted(idle, key=lambda call: call.slot):
            self._continue(call)
        while len(self._calls) < concurrency:
            call = TimedCall(self._first_slot + len(self._calls), self._ended)
            self._calls.append(call)
            self._continue(call)

    def _continue(self, call: TimedCall) -> None:
        if self._may_start(call):
            self._begin(call, monotonic_ns(), call.channel or self._free_channel())
        else:
            self._idle.add(call)

    def _may_start(self, call: TimedCall) -> bool:
        if call.slot - self._first_slot >= self._concurrency:
            return self._sequence_source is not None and self._sequence_source.finish(call.slot)
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    def _ended(self, call: TimedCall) -> None:
        self._note(call)
        if call.outcome is Outcome.CONNECTION_LOST:
            pause = min(2 * self._pauses.get(call, _FIRST_PAUSE / 2), _LONGEST_PAUSE)
            self._pauses[call] = pause
            self._loop.call_later(pause, self._continue, call)
            return
        if self._pauses:
            self._pauses.pop(call, None)
        self._continue(call)


class OpenLoad(OfferedLoad):
    """A load that starts requests at the times of a schedule, with at most ``max_calls`` at a time.

    ``waiting`` has the due times of requests that wait for a free call.
    """

    def __init__(self, sending: Sending, sequences: SequenceSource | None, max_calls: int) -> None:
        super().__init__(sending, sequences)
        self.waiting: deque[int] = deque()
        self._free = deque(TimedCall(slot, self._ended) for slot in range(max_calls))
        #: Sequences use the calls in rotation; other requests use the last free call, so that few connections are
        #: needed.
        self._take = self._free.popleft if sequences is not None else self._free.pop
        self._schedule: Iterator[int] = iter(())
        self._due = 0
        self._timer = PreciseTimer(sending.loop, self._tick)

    def run(self, schedule: Iterator[int]) -> None:
        """Start requests at the times (ns, monotonic) of ``schedule``, instead of those of the previous one."""
        self._schedule = schedule
        self._due = next(schedule, 0)
        if self._due:
            self._timer.at(self._due)

    def stop(self) -> None:
        """Start no more requests, except those that end sequences."""
        self._schedule, self._due = iter(()), 0
        self.waiting.clear()
        if self._sequence_source is not None:
            for call in [call for call in self._free if self._sequence_source.finish(call.slot)]:
                self._free.remove(call)
                self._start(call, monotonic_ns())

    def unfinished(self) -> Unfinished:
        """Return the requests in flight or waiting."""
        running = super().unfinished()
        if not self.waiting:
            return running
        first = self.waiting[0]
        return Unfinished(running.count + len(self.waiting), min(running.first_due or first, first))

    def _tick(self) -> None:
        now = monotonic_ns()
        while self._due and self._due <= now:
            if self._free:
                self._start(self._take(), self._due)
            else:
                self.waiting.append(self._due)
            self._due = next(self._schedule, 0)
        if self._due:
            self._timer.at(self._due)

    def _start(self, call: TimedCall, due: int) -> None:
        channel = call.channel
        if channel is None or channel.room <= 0:
            channel = self._free_channel()
        self._begin(call, due, channel)

    def _ended(self, call: TimedCall) -> None:
        self._note(call)
        if self.waiting:
            self._start(call, self.waiting.popleft())
        elif not self._due and self._sequence_source is not None and self._sequence_source.finish(call.slot):
            self._start(call, monotonic_ns())
        else:
            self._free.append(call)
