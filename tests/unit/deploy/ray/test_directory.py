"""What the directory tells ingresses, and how long it keeps a replica that ends waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from conch.deploy.ray import directory as module
from conch.deploy.ray.directory import ReplicaDirectory
from conch.deploy.ray.listing import News
from tests.unit.deploy.ray.records import ingress, replica, until


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
async def directory(clock: Clock) -> AsyncIterator[ReplicaDirectory]:
    directory = object.__new__(ReplicaDirectory)
    await directory.__init__()  # type: ignore[misc]  # as Ray Serve calls it
    yield directory
    directory._looking.cancel()


def asked(directory: ReplicaDirectory, known: int, name: str = "i") -> asyncio.Task[News]:
    """An ingress that waits for news."""
    return asyncio.ensure_future(directory.changes(ingress(name), known))


async def test_an_ingress_that_knows_nothing_is_told_at_once(directory: ReplicaDirectory) -> None:
    await directory.announce(replica())
    answer = await directory.changes(ingress(), 0)
    assert answer.replicas == (replica(),)
    assert await directory.ingresses() == (ingress(),)
    assert await directory.replicas() == (replica(),)


async def test_an_ingress_that_knows_all_is_told_when_a_replica_comes(directory: ReplicaDirectory) -> None:
    known = (await directory.changes(ingress(), 0)).revision
    waiting = asked(directory, known)
    await until(lambda: bool(directory._watchers))
    await directory.announce(replica())
    assert (await waiting).replicas == (replica(),)
    again = asked(directory, waiting.result().revision)
    await directory.announce(replica())  # which is no news
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_an_ingress_is_answered_also_without_news(
    directory: ReplicaDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.001)
    known = (await directory.changes(ingress(), 0)).revision
    assert (await directory.changes(ingress(), known)).revision == known


async def test_a_replica_that_ends_waits_until_every_ingress_has_done_what_it_was_told(
    directory: ReplicaDirectory,
) -> None:
    await directory.announce(replica())
    known = (await directory.changes(ingress("i"), 0)).revision
    first, second = asked(directory, known, "i"), asked(directory, known, "j")
    await until(lambda: len(directory._watchers) == 2)
    ending = asyncio.ensure_future(directory.withdraw("a"))
    revision = (await first).revision
    assert (await second).withdrawn == {"a"}
    first = asked(directory, revision, "i")
    await until(lambda: directory._watchers["i"][1] == revision)
    assert not ending.done()
    second = asked(directory, revision, "j")
    await ending
    first.cancel(), second.cancel()


async def test_a_replica_that_ends_does_not_wait_for_an_ingress_that_leaves(directory: ReplicaDirectory) -> None:
    await directory.changes(ingress(), 0)
    ending = asyncio.ensure_future(directory.withdraw("a"))
    await asyncio.sleep(0)
    await directory.leave("i")
    await ending
    await directory.leave("i")  # once is enough


async def test_a_replica_that_ends_does_not_wait_for_an_ingress_that_is_gone(
    directory: ReplicaDirectory, clock: Clock
) -> None:
    await directory.changes(ingress(), 0)
    clock.now += 1000
    await directory.withdraw("a")
    assert await directory.ingresses() == ()


async def test_a_replica_that_ends_waits_no_longer_than_allowed_for_an_ingress_that_hangs(
    directory: ReplicaDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WITHDRAW_SECONDS", 0.001)
    await directory.changes(ingress(), 0)
    await directory.withdraw("a")
    assert await directory.ingresses() == (ingress(),)


async def test_an_ingress_is_told_of_a_replica_that_has_fallen_silent(
    directory: ReplicaDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    directory._looking.cancel()
    directory._looking = asyncio.ensure_future(directory._look())
    await directory.announce(replica())
    waiting = asked(directory, (await directory.changes(ingress(), 0)).revision)
    await until(lambda: bool(directory._watchers))
    clock.now += 1000
    assert (await waiting).replicas == ()


async def test_failures_are_kept_until_a_replica_has_started_or_all_begins_anew(directory: ReplicaDirectory) -> None:
    await directory.failed("echo", "no memory")
    await directory.failed("other", "no weights")
    assert await directory.failures() == {"echo": "no memory", "other": "no weights"}
    await directory.announce(replica(deployment="echo"))
    assert await directory.failures() == {"other": "no weights"}
    await directory.forget_failures()
    assert await directory.failures() == {}
