"""Autoscaling policies: how many replicas Ray Serve should run.

Serve runs them in its controller and sends this module to it by value, so it imports nothing of conch. Deployed
applications store the path of this module, and later versions of conch must be able to read them.
"""

from __future__ import annotations

import time
from typing import Any

#: The metric name under which replicas report in-flight requests.
IN_FLIGHT = "in_flight"

#: The time to cache the number of nodes (s), because the controller requests it ten times per second.
_NODES_SECONDS = 1.0


class ByRequests:
    """As many replicas as needed for ``target_ongoing_requests`` of the autoscaling configuration in each."""

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        in_flight = (context.aggregated_metrics or {}).get(IN_FLIGHT, {})
        return sum(in_flight.values()) / context.config.target_ongoing_requests, {}


class OnePerNode:
    """As many replicas as the cluster has nodes."""

    def __init__(self) -> None:
        self._nodes = 1
        self._counted = float("-inf")

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        import ray

        now = time.monotonic()
        if now - self._counted > _NODES_SECONDS:
            self._nodes = max(sum(bool(node["Alive"]) for node in ray.nodes()), 1)
            self._counted = now
        return self._nodes, {}
