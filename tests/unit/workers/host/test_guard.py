"""The guard's process, which here loses a server that has ended nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from conch.workers.host.processes import Guard

Program = subprocess.Popen[bytes]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """Three programs, each the leader of a process group."""
    started = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    yield started
    for program in started:
        program.kill()
        program.wait()


async def test_groups_that_are_left_are_killed_and_those_that_have_ended_are_forgotten(programs: list[Program]) -> None:
    guard = Guard()
    for program in programs[:2]:
        guard.watch(program.pid)
    guard.forget(programs[0].pid)
    await guard.close()
    assert programs[1].wait(60) == -signal.SIGKILL
    assert [programs[0].poll(), programs[2].poll()] == [None, None]


async def test_a_guard_that_was_killed_is_replaced_by_one_that_knows_as_much(programs: list[Program]) -> None:
    before = psutil.Process().children()
    guard = Guard()
    guard.watch(programs[0].pid)
    [killed] = [child for child in psutil.Process().children() if child not in before]
    killed.kill()
    killed.wait()
    guard.watch(programs[1].pid)
    await guard.close()
    assert [program.wait(60) for program in programs[:2]] == [-signal.SIGKILL] * 2
    assert programs[2].poll() is None


async def test_a_guard_ends_though_a_process_that_the_server_has_forked_keeps_its_pipe_open() -> None:
    guard = Guard()
    guard.watch(os.getppid())
    guard.forget(os.getppid())
    forked = os.fork()
    if not forked:
        signal.pause()
    try:
        await asyncio.wait_for(guard.close(), 4)  # sooner than it would be killed
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
