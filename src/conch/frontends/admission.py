"""Limits the number of connections: ``--max-connections`` and the limit of open files.

All front ends share one ``Admission`` on the event loop. A few connections above the limit may request the server's
health, so that clients can tell a full server from a hung one. Some descriptors are reserved for workers and files. The
operating system always assigns the lowest free descriptor, so the number of a new one shows how many are in use.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Final

from conch.core.errors import ConchError, unavailable
from conch.telemetry.traffic import ConnectionCounts, Protocol

LOG = logging.getLogger("conch")

#: Connections above the limit that may request the server's health.
FOR_HEALTH: Final = 16
#: Descriptors reserved for workers, files and helpers; an eighth of the limit if that is less.
FOR_OTHERS: Final = 128
#: Minimum interval between log messages about too many connections (s).
LOG_SECONDS: Final = 60.0


class AdmissionResult(Enum):
    """The permissions of a new connection."""

    SERVED = "served"
    HEALTH_ONLY = "health only"
    REFUSED = "refused"


class Admission:
    """Admits connections; ``max_connections`` is ``--max-connections``, 0 for as many as ``descriptors()`` allow."""

    def __init__(
        self,
        max_connections: int,
        counts: ConnectionCounts,
        *,
        descriptors: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._max_connections = max_connections
        self._counts = counts
        limit = descriptors()
        #: The first descriptor that connections may not use.
        self._end = limit - min(FOR_OTHERS, limit // 8)
        self._clock = clock
        self._logged = -LOG_SECONDS

    def admit(self, protocol: Protocol, descriptor: int) -> AdmissionResult:
        """Decide about a connection that has just been opened and counted; ``descriptor`` is -1 if unknown."""
        too_many = self._counts.total - self._max_connections if self._max_connections else 0
        over = max(too_many, descriptor - self._end + FOR_HEALTH + 1)
        if over <= 0:
            return AdmissionResult.SERVED
        self._counts.closed_for(protocol, "connections")
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            LOG.warning(
                "%d connections are open, as many as %s: further ones may only check the server's health",
                self._counts.total - max(too_many, 1),
                "--max-connections allows" if too_many > 0 else "the limit of open files (ulimit -n) leaves room for",
            )
        return AdmissionResult.HEALTH_ONLY if over <= FOR_HEALTH else AdmissionResult.REFUSED

    @staticmethod
    def refusal() -> ConchError:
        """Return the error for a request on a connection that was not admitted."""
        return unavailable("too many connections are open, see --max-connections; try again later")


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """Return the file descriptor of a connection's socket, -1 if it has none."""
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
