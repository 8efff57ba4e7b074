"""Takes the place of Ray and Ray Serve where a replica or an ingress is made: without a cluster, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from conch.deploy.ray.directory import ReplicaDirectory


class Remote:
    """A handle of an object in this process; ``away`` has its calls fail as Ray's do where nobody answers."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.away = False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        async def remote(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.away:
                raise RuntimeError("The actor died unexpectedly before finishing this task.\n\tclass_name: ...")
            return await getattr(self.target, name)(*arguments)

        return SimpleNamespace(remote=remote)


async def made(kind: type, *arguments: Any) -> Any:
    """An object whose constructor is a coroutine, as Ray Serve makes it."""
    one: Any = object.__new__(kind)
    await one.__init__(*arguments)
    return one


async def directory() -> ReplicaDirectory:
    found: ReplicaDirectory = await made(ReplicaDirectory)
    return found


class FakeServe:
    """What replicas ask of Ray Serve; ``model`` is the one that the request is for which runs now."""

    def __init__(self) -> None:
        self.model = ""
        self.most = 0

    def get_replica_context(self) -> SimpleNamespace:
        return SimpleNamespace(replica_tag="deployment#1")

    def get_multiplexed_model_id(self) -> str:
        return self.model

    def multiplexed(self, *, max_num_models_per_replica: int) -> Callable[[Any], Any]:
        self.most = max_num_models_per_replica
        return lambda function: function


def install(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    serve = FakeServe()
    ray = SimpleNamespace(
        serve=serve,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    return serve
