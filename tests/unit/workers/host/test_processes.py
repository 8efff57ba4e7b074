"""The workers of a server, and what becomes of those that nobody ends."""

from __future__ import annotations

import pytest

from conch.errors import Code, ConchError
from conch.workers.host.processes import WorkerProcesses
from tests.unit.workers.host.fakes import FakeChild


async def test_workers_that_are_left_are_killed_and_waited_for() -> None:
    children = [FakeChild() for _ in range(3)]
    processes = WorkerProcesses()
    names = ("left", "ended", "never started")
    left, ended, never = (processes.new(name, child.spawn) for name, child in zip(names, children, strict=True))
    for process in (left, ended):
        process.start({}, python="python", environment={})
    children[1].exit(0)
    await processes.close()
    assert [child.kills for child in children] == [1, 0, 0]
    assert not left.alive and not ended.alive and not never.alive
    with pytest.raises(ConchError, match="worker 'late' is not started: the server is stopping") as raised:
        processes.new("late")
    assert raised.value.code is Code.UNAVAILABLE
    for child in children[:2]:
        child.close()
