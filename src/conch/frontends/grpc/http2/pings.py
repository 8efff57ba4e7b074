"""Limits how often a client may ping: gRPC's rule with its options ``--grpc-http2-…``."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from conch.settings import Settings

#: gRPC's minimum interval on a connection without calls, unless keepalive pings are permitted there (s).
_WITHOUT_CALLS: Final = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class PingLimits:
    """Minimum ``interval`` (s) between two pings without data, and the number of ``strikes`` allowed."""

    interval: float
    interval_without_calls: float
    strikes: float

    @classmethod
    def of(cls, settings: Settings) -> PingLimits:
        """Create the limits from the options."""
        interval = settings.grpc_http2_min_recv_ping_interval_without_data / 1000
        permitted = settings.grpc_keepalive_permit_without_calls
        return cls(
            interval,
            interval if permitted else max(interval, _WITHOUT_CALLS),
            settings.grpc_http2_max_ping_strikes or inf,
        )


class PingStrikes:
    """Counts the pings of one connection that came too early."""

    __slots__ = ("_last", "_limits", "_strikes")

    def __init__(self, limits: PingLimits) -> None:
        self._limits = limits
        self._strikes = 0
        self._last = -inf

    def reset(self) -> None:
        """Allow the next ping at once, because something was sent since the last one."""
        self._strikes = 0
        self._last = -inf

    def are_too_many(self, now: float, *, calls: bool) -> bool:
        """Count a ping at ``now`` (s, monotonic); ``calls`` is true if there are open calls."""
        interval = self._limits.interval if calls else self._limits.interval_without_calls
        if now - self._last < interval:
            self._strikes += 1
        self._last = now
        return self._strikes > self._limits.strikes
