"""Takes the place of Ray and Ray Serve where a replica or an ingress is made: without a cluster, on this machine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conch.deploy.ray.registry import ReplicaRegistry


class Remote:
    """A handle of an object in this process; ``away`` has its calls fail as Ray's do where nobody answers."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.away = False
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        async def remote(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if self.away:
                raise RuntimeError("The actor died unexpectedly before finishing this task.\n\tclass_name: ...")
            return await getattr(self.target, name)(*arguments)

        return SimpleNamespace(remote=remote)


async def made(kind: type, *arguments: Any) -> Any:
    """An object whose constructor is a coroutine, as Ray Serve makes it."""
    one: Any = object.__new__(kind)
    await one.__init__(*arguments)
    return one


async def registry() -> ReplicaRegistry:
    found: ReplicaRegistry = await made(ReplicaRegistry)
    return found


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = SimpleNamespace(get_replica_context=lambda: SimpleNamespace(replica_tag="deployment#1"))
    ray = SimpleNamespace(
        serve=serve,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
