"""How many replicas there should be."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conch.deploy.ray import scaling
from conch.deploy.ray.scaling import IN_FLIGHT, ByRequests, OnePerNode


def context(metrics: Any, target: float = 4) -> SimpleNamespace:
    return SimpleNamespace(aggregated_metrics=metrics, config=SimpleNamespace(target_ongoing_requests=target))


@pytest.mark.parametrize(
    ("metrics", "replicas"),
    [
        ({IN_FLIGHT: {"a": 6.0, "b": 2.0}}, 2.0),
        ({IN_FLIGHT: {"a": 1.0}}, 0.25),  # Ray Serve rounds up, and keeps to the minimum
        ({IN_FLIGHT: {}}, 0.0),
        ({}, 0.0),
        (None, 0.0),
    ],
)
def test_replicas_follow_the_requests(metrics: Any, replicas: float) -> None:
    assert ByRequests()(context(metrics)) == (replicas, {})


def test_each_live_node_has_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True}, {"Alive": False}, {"Alive": True}]
    asked = []

    def list_nodes() -> list[dict[str, bool]]:
        asked.append(1)
        return nodes

    now = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=list_nodes))
    monkeypatch.setattr(scaling, "time", now)
    policy = OnePerNode()
    assert policy(None) == (2, {})
    nodes.pop()
    assert policy(None) == (2, {})
    assert len(asked) == 1
    now.monotonic = lambda: 102.0
    assert policy(None) == (1, {})
    nodes.clear()
    now.monotonic = lambda: 104.0
    assert policy(None) == (1, {})
