"""When the heap of the server is trimmed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from conch.machine.memory import resident_bytes
from conch.server import heap
from conch.server.heap import PERIOD, HeapTrimmer, heap_trimmer
from tests.unit.fake_clock import fake_clock, settle

MEBIBYTE = 1 << 20


class FakeProcess:
    """A process with so much memory (MiB); trimming leaves ``needed``."""

    def __init__(self) -> None:
        self.memory = self.needed = 60
        self.seconds = 0.0
        self.trims = 0

    def _run_at_once(self, executor: object, function: Callable[[], object]) -> asyncio.Future[object]:
        """Run a function in place of the thread, for which a fake clock does not wait."""
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        ended.set_result(function())
        return ended

    def trim(self) -> None:
        self.memory = self.needed
        self.trims += 1

    def trimmer(self) -> HeapTrimmer:
        loop: Any = asyncio.get_running_loop()
        loop.run_in_executor = self._run_at_once
        return HeapTrimmer(self.trim, lambda: self.memory * MEBIBYTE, lambda: self.seconds)


async def pass_period() -> None:
    await asyncio.sleep(PERIOD)
    await settle()


@fake_clock
async def test_memory_is_given_back_when_the_server_is_at_rest() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await pass_period()
    assert process.trims == 0
    process.memory = 600
    await pass_period()
    assert (process.memory, process.trims) == (60, 1)
    await pass_period()
    assert process.trims == 1
    trimmer.close()


@fake_clock
async def test_what_came_in_the_first_period_is_given_back() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = 600
    await pass_period()
    assert (process.memory, process.trims) == (60, 1)
    trimmer.close()


@fake_clock
async def test_what_is_freed_seconds_later_is_given_back() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = process.needed = 600
    for _ in range(20):
        await pass_period()
    process.needed = 60
    for _ in range(20):
        await pass_period()
    assert process.memory == 60
    trimmer.close()


@fake_clock
async def test_what_is_freed_after_the_first_trial_is_given_back_by_a_later_one() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await pass_period()
    process.memory, process.needed = 600, 200
    await pass_period()
    process.needed = 60
    await pass_period()
    assert (process.memory, process.trims) == (60, 2)
    trimmer.close()


@fake_clock
async def test_a_busy_server_keeps_its_heap() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = 600
    process.seconds += PERIOD
    await pass_period()
    assert process.memory == 600
    trimmer.close()


@fake_clock
async def test_memory_that_is_needed_is_not_trimmed_again_and_again() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await pass_period()
    process.memory = process.needed = 600
    for _ in range(50):
        await pass_period()
    tried = process.trims
    assert tried < 10
    process.seconds += PERIOD  # it works, and comes to rest again
    for _ in range(50):
        await pass_period()
    assert tried < process.trims <= 2 * tried
    trimmer.close()


async def test_the_c_library_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "PERIOD", 0.02)
    trimmer = heap_trimmer()
    if trimmer is None:
        pytest.skip("the C library has no malloc_trim")
    blocks = [b"x" * 100_000 for _ in range(1000)]
    last = b"x" * 100_000  # keeps the C library from giving back the end of the heap by itself
    before = resident_bytes(os.getpid())
    del blocks
    async with asyncio.timeout(30):
        while resident_bytes(os.getpid()) > before - 50 * MEBIBYTE:
            await asyncio.sleep(0.01)
    trimmer.close()
    del last
