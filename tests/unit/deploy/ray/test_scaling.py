"""How many replicas there should be."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conch.deploy.ray import scaling
from conch.deploy.ray.scaling import UNDER_WAY, ByRequests, OnePerNode


def context(told: Any, through_serve: float = 0, target: float = 4) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=told,
        total_num_requests=through_serve,
        config=SimpleNamespace(target_ongoing_requests=target),
    )


@pytest.mark.parametrize(
    ("told", "through_serve", "replicas"),
    [
        ({UNDER_WAY: {"a": 6.0, "b": 2.0}}, 0, 2.0),
        ({UNDER_WAY: {"a": 1.0}}, 0, 0.25),  # Ray Serve rounds up, and keeps to the least
        ({UNDER_WAY: {"a": 4.0}}, 10, 2.5),  # which has not reached a replica yet
        ({UNDER_WAY: {"a": 12.0}}, 10, 3.0),
        ({UNDER_WAY: {}}, 8, 2.0),  # no replica is there
        ({}, 8, 2.0),  # none has said anything
        (None, 0, 0.0),
    ],
)
def test_replicas_follow_the_requests(told: Any, through_serve: float, replicas: float) -> None:
    assert ByRequests()(context(told, through_serve)) == (replicas, {})


def test_every_node_that_lives_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
