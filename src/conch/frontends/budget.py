"""The bytes that clients make the server hold, over all its connections: one budget, ``--max-bytes-in-flight``.

Counted are bodies while they arrive and until they are answered, messages as they are after decompression, and answers
that clients have not read.  :mod:`conch.app` makes one ``ByteBudget``, which connections of all front ends share; it
lives on the event loop.

Bytes are counted when they are there (:meth:`ByteBudget.take`), never because a client announces them, so that nobody
gets a share for nothing.  A connection that is told that the budget is used up stops reading and waits.  Bodies that
have arrived in part could wait for each other for ever: when none of them has got on for ``PATIENCE``, the youngest are
refused until the oldest does.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final

from conch.errors import ConchError, unavailable
from conch.telemetry.exposition import Family, MetricSample
from conch.telemetry.memory import usable_memory
from conch.telemetry.traffic import BYTES_IN_FLIGHT, MAX_BYTES_IN_FLIGHT, REFUSED_FOR_BYTES

#: Whoever holds no more than this (bytes) goes on even when the budget is used up, unless it is ``overdrawn``.
SMALL: Final = 16 << 10
#: How long those who wait are left without a byte, all of them (s).
PATIENCE: Final = 5.0
#: What one who waited may read before the others are let go as well (bytes).
_TURN: Final = 256 << 10
#: How often those who wait are looked at while nothing is given back (s).
_LOOK_SECONDS: Final = 0.05


class BudgetWait:
    """Somebody who waits: ``since`` orders them (s), one of the two functions is called, unless it is cancelled."""

    __slots__ = ("began", "on_refused", "on_room", "since")

    def __init__(
        self, since: float, began: float, on_room: Callable[[], None], on_refused: Callable[[ConchError], None]
    ) -> None:
        self.since = since
        self.began = began
        self.on_room = on_room
        self.on_refused = on_refused


class ByteBudget:
    """Counts the bytes in flight: ``used`` of ``size``.

    ``refused`` counts requests that were refused for it; ``timeout`` is how long those who wait are left alone (s).
    """

    def __init__(self, size: int, *, timeout: float = PATIENCE, clock: Callable[[], float] = monotonic) -> None:
        self.size = size
        self.used = 0
        self.refused = 0
        self.timeout = timeout
        self._clock = clock
        self._waiting: list[BudgetWait] = []
        self._let_go = 0.0  # when one who waited went on
        self._look: asyncio.Handle | None = None

    @classmethod
    def of(cls, setting: int) -> ByteBudget:
        """The budget that ``--max-bytes-in-flight`` asks for: 0 is a quarter of the memory that there is."""
        return cls(setting or usable_memory() // 4)

    @property
    def overdrawn(self) -> bool:
        """Whether so much is in flight that not even small requests go on."""
        return self.used > self.size + self.size // 4

    def take(self, size: int) -> bool:
        """Count bytes that are there; False if the budget is used up, when the caller waits or gives them up."""
        self.used += size
        return self.used <= self.size

    def release(self, size: int) -> None:
        """Bytes that were taken are gone."""
        self.used -= size
        if self._waiting:
            self._look_in(0)

    def wait(self, since: float, on_room: Callable[[], None], on_refused: Callable[[ConchError], None]) -> BudgetWait:
        """Wait for room on behalf of a body that began to arrive at ``since`` (s, monotonic).

        Either ``on_room`` is called once, or ``on_refused`` with the error for the client, which must release what is
        held.  Neither is called from within this call.
        """
        waiting = BudgetWait(since, self._clock(), on_room, on_refused)
        insort(self._waiting, waiting, key=lambda one: one.since)
        if self._look is None:
            self._look_in(_LOOK_SECONDS)
        return waiting

    def cancel(self, waiting: BudgetWait) -> None:
        """Whoever waited is gone; without effect if it has been called already."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def refusal(self) -> ConchError:
        """Count a refusal, and return its error: UNAVAILABLE, which HTTP answers with 503."""
        self.refused += 1
        return unavailable(
            f"the server holds {self.used} bytes of requests and answers, and --max-bytes-in-flight allows {self.size};"
            " try again later"
        )

    def families(self) -> Iterator[Family]:
        """What the metrics page shows of the budget."""
        yield BYTES_IN_FLIGHT, [MetricSample("", self.used)]
        yield MAX_BYTES_IN_FLIGHT, [MetricSample("", self.size)]
        yield REFUSED_FOR_BYTES, [MetricSample("", self.refused)]

    def _look_in(self, seconds: float) -> None:
        if self._look is not None:
            self._look.cancel()
        loop = asyncio.get_running_loop()
        self._look = (
            loop.call_later(seconds, self._look_at_waiting) if seconds else loop.call_soon(self._look_at_waiting)
        )

    def _look_at_waiting(self) -> None:
        """Let the oldest go on while there is room, or refuse the youngest if none has gone on for too long."""
        self._look = None
        now = self._clock()
        waiting = self._waiting
        room = self.size - self.used
        while waiting and room > 0:
            self._let_go = now
            waiting.pop(0).on_room()
            room = min(room - _TURN, self.size - self.used)
        while waiting and self.used >= self.size and now - max(self._let_go, waiting[0].began) >= self.timeout:
            waiting.pop().on_refused(self.refusal())
        if waiting and self._look is None:
            self._look_in(_LOOK_SECONDS)
