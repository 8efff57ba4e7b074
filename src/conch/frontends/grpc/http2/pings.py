"""How often a client may ping: the rule of gRPC, and its flags ``--grpc-http2-…``.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from conch.settings import Settings

#: What gRPC allows on a connection without calls, unless the server itself pings those (s).
_WITHOUT_CALLS: Final = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class PingLimits:
    """``interval`` (s) between two pings without data, and how many ``strikes`` are forgiven."""

    interval: float
    interval_without_calls: float
    strikes: float

    @classmethod
    def of(cls, settings: Settings) -> PingLimits:
        """As the flags say."""
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
        """Something was sent since the last ping: the next one is allowed at once."""
        self._strikes = 0
        self._last = -inf

    def are_too_many(self, now: float, *, calls: bool) -> bool:
        """Count a ping at ``now`` (s, monotonic), while there are ``calls`` or not."""
        interval = self._limits.interval if calls else self._limits.interval_without_calls
        if now - self._last < interval:
            self._strikes += 1
        self._last = now
        return self._strikes > self._limits.strikes
