"""Autoscaling policies: how many replicas Ray Serve should run.

Serve runs them in its controller, to which it sends this module by value: it imports nothing of conch.  The path of
this module is part of the state of a deployed application, which a later version of conch has to read.
"""

from __future__ import annotations

import time
from typing import Any

#: The name by which replicas report their in-flight requests.
IN_FLIGHT = "in_flight"

#: How long the number of nodes is cached (s): the controller asks ten times a second.
_NODES_SECONDS = 1.0


class ByRequests:
    """As many replicas as it takes to have ``target_ongoing_requests`` of the autoscaling configuration in each."""

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
