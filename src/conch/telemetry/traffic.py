"""The metrics of connections and of what they make the server hold; whoever counts it gives the numbers."""

from __future__ import annotations

from typing import Final

from conch.telemetry.exposition import Metric

BYTES_IN_FLIGHT: Final = Metric(
    "conch_bytes_in_flight", "gauge", "Bytes of requests that are not answered and of answers that are not read"
)
MAX_BYTES_IN_FLIGHT: Final = Metric(
    "conch_max_bytes_in_flight", "gauge", "How many there may be before requests wait, and are refused"
)
REFUSED_FOR_BYTES: Final = Metric(
    "conch_refused_for_bytes_in_flight", "counter", "Number of requests refused because there were too many"
)
