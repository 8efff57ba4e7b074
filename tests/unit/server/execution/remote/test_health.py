"""When a server is asked whether it has its model ready."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from conch.client.transport import LostError, UnreachableError
from conch.core.errors import unavailable
from conch.server.execution.remote import executor
from conch.server.execution.remote.executor import HealthWatch
from tests.unit.server.execution.remote.fakes import A, FakeServer


async def test_a_server_that_is_away_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    enough = asyncio.Event()

    class Timeout:
        """A timer that is over at once, and notes how long it would have been."""

        def __init__(self, seconds: float) -> None:
            delays.append(seconds)

        async def __aenter__(self) -> None:
            await asyncio.sleep(0)
            if len(delays) > 8:
                enough.set()
                await asyncio.Event().wait()
            raise TimeoutError

        async def __aexit__(self, *error: object) -> None: ...

    monkeypatch.setattr(executor.asyncio, "timeout", Timeout)
    server = FakeServer(A)
    server.reason = UnreachableError("no connection")
    watch = HealthWatch(server, 2.0, lambda reason, gone: None)
    await enough.wait()
    watch.stop()
    assert delays[0] == 0.1
    assert all(later == min(2.0, 2 * sooner) for sooner, later in pairwise(delays))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, ("", False)),
        (UnreachableError("no connection"), ("no connection", True)),
        (LostError("the connection broke"), ("the connection broke", True)),
        (unavailable("model 'm' is not ready there"), ("model 'm' is not ready there", False)),
        (KeyError("x"), ("it could not be checked: KeyError('x')", False)),
    ],
)
async def test_the_verdict_says_why_and_whether_the_server_has_gone(
    error: Exception | None, verdict: tuple[str, bool]
) -> None:
    server, verdicts = FakeServer(A), []
    server.reason = error
    watch = HealthWatch(server, 600.0, lambda reason, gone: verdicts.append((reason, gone)))
    await watch.first()
    assert verdicts == [verdict]
    watch.look()
    while len(verdicts) < 2:
        await asyncio.sleep(0)
    watch.stop()
