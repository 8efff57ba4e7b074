"""What the registry tells ingresses, and how long it keeps a replica that ends waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from conch.deploy.ray import registry as module
from conch.deploy.ray.registry import RegistrySnapshot, ReplicaRegistry
from tests.unit.deploy.ray import fake_ray
from tests.unit.deploy.ray.records import ingress, replica
from tests.unit.fake_clock import settle


class Clock:
    """Stands still; takes the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    yield clock


@pytest.fixture
async def registry(clock: Clock) -> ReplicaRegistry:
    return await fake_ray.registry()


def asked(registry: ReplicaRegistry, known: int, name: str = "i") -> asyncio.Task[RegistrySnapshot]:
    """An ingress that waits for a change."""
    return asyncio.ensure_future(registry.watch(ingress(name), known))


async def test_an_ingress_that_knows_nothing_is_told_at_once(registry: ReplicaRegistry) -> None:
    await registry.register(replica())
    answer = await registry.watch(ingress(), 0)
    assert answer.replicas == (replica(),)
    assert await registry.ingresses() == (ingress(),)
    assert await registry.replicas() == (replica(),)


async def test_an_ingress_that_knows_all_is_told_when_a_replica_comes(registry: ReplicaRegistry) -> None:
    known = (await registry.watch(ingress(), 0)).revision
    waiting = asked(registry, known)
    await settle()
    assert not waiting.done()
    await registry.register(replica())
    assert (await waiting).replicas == (replica(),)
    again = asked(registry, waiting.result().revision)
    await registry.register(replica())  # which changes nothing
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_an_ingress_is_answered_also_without_a_change(
    registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    known = (await registry.watch(ingress(), 0)).revision
    assert (await registry.watch(ingress(), known)).revision == known


async def test_a_replica_that_ends_waits_until_every_ingress_has_done_what_it_was_told(
    registry: ReplicaRegistry,
) -> None:
    await registry.register(replica())
    known = (await registry.watch(ingress("i"), 0)).revision
    first, second = asked(registry, known, "i"), asked(registry, known, "j")
    await settle()
    assert await registry.ingresses() == (ingress("i"), ingress("j"))
    ending = asyncio.ensure_future(registry.deregister("a"))
    revision = (await first).revision
    assert (await second).deregistered == {"a"}
    first = asked(registry, revision, "i")
    await settle()
    assert not ending.done()
    second = asked(registry, revision, "j")
    await ending
    first.cancel(), second.cancel()


async def test_a_replica_that_ends_does_not_wait_for_an_ingress_that_leaves(registry: ReplicaRegistry) -> None:
    await registry.watch(ingress(), 0)
    ending = asyncio.ensure_future(registry.deregister("a"))
    await asyncio.sleep(0)
    await registry.leave("i")
    await ending
    await registry.leave("i")  # once is enough


async def test_a_replica_that_ends_does_not_wait_for_an_ingress_that_is_gone(
    registry: ReplicaRegistry, clock: Clock
) -> None:
    await registry.watch(ingress(), 0)
    clock.now += 1000
    await registry.deregister("a")
    assert await registry.ingresses() == ()


async def test_a_replica_that_ends_waits_no_longer_than_allowed_for_an_ingress_that_hangs(
    registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEREGISTER_SECONDS", 0.001)
    await registry.watch(ingress(), 0)
    await registry.deregister("a")
    assert await registry.ingresses() == (ingress(),)


async def test_an_ingress_is_notified_of_a_silent_replica(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRE_SECONDS", 0.001)
    registry = await fake_ray.registry()
    await registry.register(replica())
    waiting = asked(registry, (await registry.watch(ingress(), 0)).revision)
    await settle()
    assert not waiting.done()
    clock.now += 1000
    assert (await waiting).replicas == ()


async def test_failures_are_kept_until_a_replica_has_started_or_all_restarts(registry: ReplicaRegistry) -> None:
    await registry.failed("echo", "no memory")
    await registry.failed("other", "no weights")
    assert await registry.failures() == {"echo": "no memory", "other": "no weights"}
    await registry.register(replica(deployment="echo"))
    assert await registry.failures() == {"other": "no weights"}
    await registry.forget_failures()
    assert await registry.failures() == {}
