"""The worker processes of a server, including those that are not stopped."""

from __future__ import annotations

import asyncio

import pytest

from conch.core.errors import Code, ConchError
from conch.workers.host import processes as workers
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


async def test_worker_that_is_debugged_is_answered_and_ended_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    child = FakeChild()
    monkeypatch.setattr(workers, "spawn_at_terminal", child.spawn)
    processes = WorkerProcesses()
    process = processes.new("m_0", debugged=True)
    process.start({}, python="python", environment={})
    assert processes.pids == [child.pid]
    family = {"number": 1, "name": "words", "description": "", "kind": "COUNTER"}
    child.send({"op": "metric_control", "call": 1, "do": "family", **family})
    frames = child.received()
    while "answer" not in [frame["op"] for frame in frames]:
        await asyncio.sleep(0)
        frames += child.received()
    await processes.close()
    assert child.kills == 1
    child.close()
