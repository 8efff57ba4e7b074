"""How many connections are served, and what becomes of those beyond: ``--max-connections`` and descriptors.

All front ends share one ``Admission``, on the event loop.  A few connections more are served if they only ask for the
server's health, so that a server that is full can be told from one that hangs; some descriptors are left for workers
and files.  The lowest free descriptor is always taken next, so that of a new connection shows how many there are.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Final

from conch.errors import ConchError, unavailable
from conch.telemetry.traffic import ConnectionCounts, Protocol

LOG = logging.getLogger("conch")

#: How many connections more may ask for the server's health.
FOR_HEALTH: Final = 16
#: Descriptors that connections leave to workers, files and helpers, or an eighth of all where there are few.
FOR_OTHERS: Final = 128
#: How often the log says that there are too many connections (s).
LOG_SECONDS: Final = 60.0


class AdmissionResult(Enum):
    """What a new connection may do."""

    SERVED = "served"
    HEALTH_ONLY = "health only"
    REFUSED = "refused"


class Admission:
    """Places connections; ``most`` is ``--max-connections``, 0 for as many as ``descriptors()`` leave."""

    def __init__(
        self,
        most: int,
        counts: ConnectionCounts,
        *,
        descriptors: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._most = most
        self._counts = counts
        limit = descriptors()
        #: The first descriptor that no connection gets.
        self._end = limit - min(FOR_OTHERS, limit // 8)
        self._clock = clock
        self._logged = -LOG_SECONDS

    def place(self, protocol: Protocol, descriptor: int) -> AdmissionResult:
        """Where a connection belongs that has just been opened, and counted; -1 for an unknown ``descriptor``."""
        too_many = self._counts.total - self._most if self._most else 0
        over = max(too_many, descriptor - self._end + FOR_HEALTH + 1)
        if over <= 0:
            return AdmissionResult.SERVED
        self._counts.closed_for(protocol, "connections")
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            LOG.warning(
                "%d connections are open, as many as %s: others may only ask for the server's health",
                self._counts.total - max(too_many, 1),
                "--max-connections allows" if too_many > 0 else "the limit of open files (ulimit -n) leaves room for",
            )
        return AdmissionResult.HEALTH_ONLY if over <= FOR_HEALTH else AdmissionResult.REFUSED

    @staticmethod
    def refusal() -> ConchError:
        """The error for a request that has no place."""
        return unavailable("too many connections are open, see --max-connections; try again later")


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """The descriptor of a connection's socket, -1 where there is none."""
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
