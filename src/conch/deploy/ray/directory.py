"""The one place where replicas say that they are there, and where ingresses wait for news.  A deployment of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from conch.deploy.ray.listing import SILENCE_SECONDS, WITHDRAW_SECONDS, IngressRecord, Listing, News, ReplicaRecord

#: How long an ingress waits for news before it asks again (s); one that has not asked for three times that is gone.
WATCH_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 3 * WATCH_SECONDS
#: How often silent replicas are looked for (s).
_LOOK_SECONDS: Final = SILENCE_SECONDS / 5


class ReplicaDirectory:
    """Keeps the listing; everything runs on the event loop of its replica, of which there is one."""

    async def __init__(self) -> None:  # type: ignore[misc]  # as Ray Serve has it
        self._listing = Listing(time.time_ns())
        self._news = asyncio.Condition()
        #: The ingresses, what each has been told, and when it last asked (s, monotonic).
        self._watchers: dict[str, tuple[IngressRecord, int, float]] = {}
        self._failures: dict[str, str] = {}
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def announce(self, record: ReplicaRecord) -> None:
        """Note that a replica answers."""
        if self._listing.announce(record, time.monotonic()):
            self._failures.pop(record.deployment, None)
            await self._tell()

    async def withdraw(self, replica: str) -> None:
        """Have nobody ask a replica any more; returns when every ingress has been told, or does not answer."""
        self._listing.withdraw(replica)
        revision = self._listing.revision
        await self._tell()
        try:
            async with asyncio.timeout(WITHDRAW_SECONDS), self._news:
                await self._news.wait_for(lambda: self._all_know(revision))
        except TimeoutError:
            pass  # an ingress that hangs learns of it when a connection is refused

    async def changes(self, ingress: IngressRecord, known: int) -> News:
        """What is known, as soon as it is no longer the revision ``known``, or after ``WATCH_SECONDS``.

        ``ingress`` asks, and has done by now what the revision ``known`` says.
        """
        self._watchers[ingress.id] = ingress, known, time.monotonic()
        await self._tell()
        try:
            async with asyncio.timeout(WATCH_SECONDS), self._news:
                await self._news.wait_for(lambda: self._listing.revision != known)
        except TimeoutError:
            pass
        return self._listing.answer()

    async def leave(self, ingress: str) -> None:
        """Wait for an ingress no more, which ends."""
        self._watchers.pop(ingress, None)
        await self._tell()

    async def failed(self, deployment: str, reason: str) -> None:
        """Note why a replica of ``deployment``, or the ingress of a node, could not start."""
        self._failures[deployment] = reason

    async def forget_failures(self) -> None:
        """Begin anew, as the application is deployed again."""
        self._failures.clear()

    async def failures(self) -> Mapping[str, str]:
        """Why deployments could not start, by deployment; one that has started since is not among them."""
        return dict(self._failures)

    async def ingresses(self) -> tuple[IngressRecord, ...]:
        """All ingresses that ask."""
        self._forget_watchers()
        return tuple(record for record, _, _ in self._watchers.values())

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        """All replicas that answer."""
        return self._listing.answer().replicas

    def _all_know(self, revision: int) -> bool:
        self._forget_watchers()
        return all(known >= revision for _, known, _ in self._watchers.values())

    def _forget_watchers(self) -> None:
        now = time.monotonic()
        self._watchers = {name: seen for name, seen in self._watchers.items() if now - seen[2] < _GONE_SECONDS}

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._listing.expire(time.monotonic()):
                await self._tell()
