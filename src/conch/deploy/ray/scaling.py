"""How many replicas Ray Serve should run, asked in its controller.

Serve ships this module there by value, so it imports nothing of conch.
"""

from __future__ import annotations

import time
from typing import Any

#: What a replica calls the number of requests that it has and that Serve does not know of.
UNDER_WAY = "under_way"

#: How long the number of nodes is believed (s): the controller asks ten times a second.
_NODES_SECONDS = 1.0


class ByRequests:
    """As many replicas as it takes to have ``target_ongoing_requests`` of the autoscaling configuration in each.

    Counts what came straight to the replicas' ports, and what came through Serve's own proxies.
    """

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        told = (context.aggregated_metrics or {}).get(UNDER_WAY, {})
        direct = sum(told.values())
        return max(direct, context.total_num_requests) / context.config.target_ongoing_requests, {}


class OnePerNode:
    """As many replicas as the cluster has nodes."""

    def __init__(self) -> None:
        self._nodes = 1
        self._asked = float("-inf")

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        import ray

        now = time.monotonic()
        if now - self._asked > _NODES_SECONDS:
            self._nodes = max(sum(bool(node["Alive"]) for node in ray.nodes()), 1)
            self._asked = now
        return self._nodes, {}
