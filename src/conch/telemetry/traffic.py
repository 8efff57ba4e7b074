"""Metrics of connections and of the memory that requests use; the counting code supplies the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

from conch.telemetry.exposition import Family, Metric, MetricSample, label_text

BYTES_IN_FLIGHT: Final = Metric("conch_bytes_in_flight", "gauge", "Bytes of in-flight requests and unread responses")
MAX_BYTES_IN_FLIGHT: Final = Metric(
    "conch_max_bytes_in_flight", "gauge", "Maximum bytes in flight before requests wait or are refused"
)
REFUSED_FOR_BYTES: Final = Metric(
    "conch_refused_for_bytes_in_flight", "counter", "Number of requests refused because too many bytes were in flight"
)
CONNECTIONS: Final = Metric("conch_connections", "gauge", "Number of open connections, by protocol")
CLOSED_CONNECTIONS: Final = Metric(
    "conch_closed_connections",
    "counter",
    "Number of connections or gRPC calls ended because of a limit, by protocol and reason",
)

Protocol = Literal["http", "grpc"]
#: The limit that closed a connection: a head, a body or reading a response took too long, the connection was idle, or
#: too many were open; a gRPC client pinged too often, or caused useless work.
Reason = Literal["head", "body", "unread", "idle", "connections", "pings", "flood"]


class ConnectionCounts:
    """Counts connections; front ends call it on the event loop."""

    def __init__(self) -> None:
        self._open: Counter[Protocol] = Counter({"http": 0, "grpc": 0})
        self._closed: Counter[tuple[Protocol, Reason]] = Counter()

    @property
    def total(self) -> int:
        """The number of open connections."""
        return self._open.total()

    def opened(self, protocol: Protocol) -> None:
        self._open[protocol] += 1

    def ended(self, protocol: Protocol) -> None:
        self._open[protocol] -= 1

    def closed_for(self, protocol: Protocol, reason: Reason) -> None:
        """Count a connection that the server closed because of a limit."""
        self._closed[protocol, reason] += 1

    def families(self) -> Iterator[Family]:
        """Yield the families of connections for the metrics page."""
        yield CONNECTIONS, [MetricSample(label_text({"protocol": name}), count) for name, count in self._open.items()]
        yield (
            CLOSED_CONNECTIONS,
            [
                MetricSample(label_text({"protocol": protocol, "reason": reason}), count)
                for (protocol, reason), count in self._closed.items()
            ],
        )
