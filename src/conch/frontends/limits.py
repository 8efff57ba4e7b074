"""Limits for clients of all protocols: bytes, time and connections.

:mod:`conch.library.app` creates one ``ClientLimits`` from the settings; the front ends share it on the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Final

from conch.frontends.admission import Admission
from conch.frontends.budget import ByteBudget
from conch.frontends.loop_budget import EventLoopBudget, YieldingLister
from conch.options.settings import Settings
from conch.telemetry.traffic import ConnectionCounts

#: A client that sends a body or reads a response at this rate (bytes/s) never exceeds a time limit.
SLOWEST: Final = 16 << 10
#: Interval at which connections are checked for time limits (s).
SWEEP_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits for clients (s); ``inf`` is unlimited.

    ``body`` and ``unread`` grow by one second for every ``SLOWEST`` bytes transferred.
    """

    head: float = inf
    body: float = inf
    unread: float = inf
    idle: float = inf

    @classmethod
    def of(cls, settings: Settings) -> TimeLimits:
        """Create the limits from the options, where 0 means unlimited."""
        return cls(
            head=settings.head_timeout_secs or inf,
            body=settings.body_timeout_secs or inf,
            unread=settings.unread_timeout_secs or inf,
            idle=settings.idle_timeout_secs or inf,
        )


class ClientLimits:
    """Shared by all front ends: byte budget, time limits, connection limits, lister and event-loop budget.

    Create it on the event loop, or pass ``loop``. ``max_connections`` is 0 for as many as the descriptors allow.
    """

    def __init__(
        self,
        budget: ByteBudget,
        times: TimeLimits = TimeLimits(),
        max_connections: int = 0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.budget = budget
        self.times = times
        self.counts = ConnectionCounts()
        self.admission = Admission(max_connections, self.counts)
        self.lister = YieldingLister()
        self.loop_budget = EventLoopBudget(loop or asyncio.get_running_loop())

    @classmethod
    def of(cls, settings: Settings) -> ClientLimits:
        """Create the limits from the options."""
        return cls(ByteBudget.of(settings.max_bytes_in_flight), TimeLimits.of(settings), settings.max_connections)
