"""When the heap of the server is trimmed."""

from __future__ import annotations

import asyncio

from conch.server.heap import PERIOD, HeapTrimmer, heap_trimmer

MEBIBYTE = 1 << 20


class FakeProcess:
    """A process with so much memory (MiB); trimming leaves ``needed``."""

    def __init__(self) -> None:
        self.memory = self.needed = 60
        self.seconds = 0.0
        self.trims = 0

    def trim(self) -> None:
        self.memory = self.needed
        self.trims += 1

    def trimmer(self) -> HeapTrimmer:
        return HeapTrimmer(self.trim, lambda: self.memory * MEBIBYTE, lambda: self.seconds)


async def look(trimmer: HeapTrimmer) -> None:
    """Let a period pass."""
    trimmer.close()
    trimmer._look()
    if trimmer._trimming is not None:
        await trimmer._trimming
        await asyncio.sleep(0)


async def test_memory_is_given_back_when_the_server_is_at_rest() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await look(trimmer)
    assert process.trims == 0
    process.memory = 600
    await look(trimmer)
    assert (process.memory, process.trims) == (60, 1)
    await look(trimmer)
    assert process.trims == 1
    trimmer.close()


async def test_what_came_in_the_first_period_is_given_back() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = 600
    await look(trimmer)
    assert (process.memory, process.trims) == (60, 1)
    trimmer.close()


async def test_what_is_freed_seconds_later_is_given_back() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = process.needed = 600
    for _ in range(20):
        await look(trimmer)
    process.needed = 60
    for _ in range(20):
        await look(trimmer)
    assert process.memory == 60
    trimmer.close()


async def test_what_is_freed_after_the_first_trial_is_given_back_by_a_later_one() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await look(trimmer)
    process.memory, process.needed = 600, 200
    await look(trimmer)
    process.needed = 60
    await look(trimmer)
    assert (process.memory, process.trims) == (60, 2)
    trimmer.close()


async def test_a_busy_server_keeps_its_heap() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    process.memory = 600
    process.seconds += PERIOD
    await look(trimmer)
    assert process.memory == 600
    trimmer.close()


async def test_memory_that_is_needed_is_not_trimmed_again_and_again() -> None:
    process = FakeProcess()
    trimmer = process.trimmer()
    await look(trimmer)
    process.memory = process.needed = 600
    for _ in range(50):
        await look(trimmer)
    tried = process.trims
    assert tried < 10
    process.seconds += PERIOD  # it works, and comes to rest again
    for _ in range(50):
        await look(trimmer)
    assert tried < process.trims <= 2 * tried
    trimmer.close()


async def test_the_systems_own_library_trims() -> None:
    trimmer = heap_trimmer()
    if trimmer is not None:
        trimmer._trim()
        trimmer.close()
