"""Limits the memory of requests and responses over all connections: ``--max-bytes-in-flight``.

The budget counts request bodies from arrival to response, decompressed messages, and responses that clients have not
read. :mod:`conch.library.app` creates one ``ByteBudget``, which the connections of all front ends share on the event
loop.

Bytes count once they have arrived (:meth:`ByteBudget.take`), not when a client announces them, so that a client cannot
reserve memory without sending data. A connection stops reading while the budget is exhausted. Partially received bodies
could wait for each other forever: if none of them progresses for ``STALL_TIMEOUT``, the youngest are refused until the
oldest continues.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final

from conch.core.errors import ConchError, unavailable
from conch.machine.memory import usable_memory
from conch.telemetry.exposition import Family, MetricSample
from conch.telemetry.traffic import BYTES_IN_FLIGHT, MAX_BYTES_IN_FLIGHT, REFUSED_FOR_BYTES

#: A body up to this size (bytes) continues when the budget is exhausted, unless the budget is ``overdrawn``.
SMALL: Final = 16 << 10
#: The time without progress after which the youngest of the waiting bodies are refused (s).
STALL_TIMEOUT: Final = 5.0
#: Bytes assumed for each body that continues, before the next one may continue.
_ASSUMED_SIZE: Final = 256 << 10
#: Interval at which waiting bodies are checked while no bytes are released (s).
_CHECK_SECONDS: Final = 0.05


class BudgetWait:
    """A waiting body: ``since`` determines the order (s); one of the two callbacks is called unless it is cancelled."""

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

    ``refused`` counts the requests refused for lack of budget; ``timeout`` is how long waiting bodies may make no
    progress (s).
    """

    def __init__(self, size: int, *, timeout: float = STALL_TIMEOUT, clock: Callable[[], float] = monotonic) -> None:
        self.size = size
        self.used = 0
        self.refused = 0
        self.timeout = timeout
        self._clock = clock
        self._waiting: list[BudgetWait] = []
        self._continued = 0.0  # when a waiting body last continued
        self._check: asyncio.Handle | None = None

    @classmethod
    def of(cls, setting: int) -> ByteBudget:
        """Create the budget for ``--max-bytes-in-flight``; 0 means a quarter of the usable memory."""
        return cls(setting or usable_memory() // 4)

    @property
    def overdrawn(self) -> bool:
        """Whether usage is so high that even small requests must wait."""
        return self.used > self.size + self.size // 4

    def take(self, size: int) -> bool:
        """Count bytes that have arrived; False if the budget is exhausted and the caller must wait or discard them."""
        self.used += size
        return self.used <= self.size

    def release(self, size: int) -> None:
        """Return bytes to the budget."""
        self.used -= size
        if self._waiting:
            self._schedule_check(0)

    def wait(self, since: float, on_room: Callable[[], None], on_refused: Callable[[ConchError], None]) -> BudgetWait:
        """Wait for budget on behalf of a body that began to arrive at ``since`` (s, monotonic).

        Calls ``on_room`` once, or ``on_refused`` with the error for the client; ``on_refused`` must release the held
        bytes. Neither is called during this call.
        """
        waiting = BudgetWait(since, self._clock(), on_room, on_refused)
        insort(self._waiting, waiting, key=lambda reservation: reservation.since)
        if self._check is None:
            self._schedule_check(_CHECK_SECONDS)
        return waiting

    def cancel(self, waiting: BudgetWait) -> None:
        """Remove a waiting body; does nothing if its callback has been called."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def refusal(self) -> ConchError:
        """Count a refusal and return its error: UNAVAILABLE, which HTTP reports as 503."""
        self.refused += 1
        return unavailable(
            f"the server holds {self.used} bytes of requests and responses, and --max-bytes-in-flight "
            f"allows {self.size};"
            " try again later"
        )

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the budget."""
        yield BYTES_IN_FLIGHT, [MetricSample("", self.used)]
        yield MAX_BYTES_IN_FLIGHT, [MetricSample("", self.size)]
        yield REFUSED_FOR_BYTES, [MetricSample("", self.refused)]

    def _schedule_check(self, seconds: float) -> None:
        if self._check is not None:
            self._check.cancel()
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(seconds, self._check_waiting) if seconds else loop.call_soon(self._check_waiting)

    def _check_waiting(self) -> None:
        """Let the oldest bodies continue while there is budget; refuse the youngest if progress has stalled."""
        self._check = None
        now = self._clock()
        waiting = self._waiting
        room = self.size - self.used
        while waiting and room > 0:
            self._continued = now
            waiting.pop(0).on_room()
            room = min(room - _ASSUMED_SIZE, self.size - self.used)
        while waiting and self.used >= self.size and now - max(self._continued, waiting[0].began) >= self.timeout:
            waiting.pop().on_refused(self.refusal())
        if waiting and self._check is None:
            self._schedule_check(_CHECK_SECONDS)
