"""What clients may take of the server, whatever their protocol: bytes, time, connections.

:mod:`conch.app` makes one ``ClientLimits`` from the settings, which the front ends share on the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Final

from conch.frontends.admission import Admission
from conch.frontends.budget import ByteBudget
from conch.frontends.loop_budget import EventLoopBudget
from conch.frontends.yielding import YieldingLister
from conch.settings import Settings
from conch.telemetry.traffic import ConnectionCounts

#: Who sends a body, or reads an answer, this fast (bytes a second) is never too slow for the limits of time.
SLOWEST: Final = 16 << 10
#: How often connections are looked at for what has taken too long (s).
SWEEP_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a client may take (s), ``inf`` for any time.

    ``body`` and ``unread`` get a second more for every ``SLOWEST`` bytes that move.
    """

    head: float = inf
    body: float = inf
    unread: float = inf
    idle: float = inf

    @classmethod
    def of(cls, settings: Settings) -> TimeLimits:
        """The limits that the flags set, where 0 is none."""
        return cls(
            head=settings.head_timeout_secs or inf,
            body=settings.body_timeout_secs or inf,
            unread=settings.unread_timeout_secs or inf,
            idle=settings.idle_timeout_secs or inf,
        )


class ClientLimits:
    """What all front ends share: the budget of bytes, the limits of time and of connections, slices and turns.

    Made in the event loop, unless ``loop`` is given.  ``max_connections`` is 0 for as many as there are descriptors.
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
        """As the flags say."""
        return cls(ByteBudget.of(settings.max_bytes_in_flight), TimeLimits.of(settings), settings.max_connections)
