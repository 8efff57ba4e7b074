"""Computation continues while all threads that wait for disks hang."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from conch.frontends.grpc.large import compress_large, inflate_large
from conch.machine.threads import compute
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import ModelTable

DATA = bytes(1 << 20)


@pytest.fixture
async def hanging() -> AsyncIterator[None]:
    """More reads than asyncio has threads for, none of which ends before the test."""
    end = threading.Event()
    reads = [asyncio.get_running_loop().run_in_executor(None, end.wait) for _ in range(100)]
    yield
    end.set()
    await asyncio.gather(*reads)


@pytest.mark.parametrize(
    "work",
    [
        lambda: inflate_large(gzip.compress(DATA), "gzip", len(DATA)),
        lambda: compress_large([DATA], "gzip"),
        lambda: MemoryLedger(ModelTable()).free(),
        lambda: MemoryLedger(ModelTable()).measure(),
    ],
    ids=["inflating", "compressing", "free memory", "memory of models"],
)
async def test_what_requests_and_budgets_wait_for_is_computed_while_disks_hang(
    hanging: None, work: Callable[[], Awaitable[object]]
) -> None:
    await asyncio.wait_for(work(), 30)


async def test_computations_get_their_arguments_and_raise_in_the_caller() -> None:
    assert await compute(divmod, 7, 2) == (3, 1)
    assert await compute(int, "ff", base=16) == 255
    with pytest.raises(ZeroDivisionError):
        await compute(divmod, 1, 0)


FORK = """
import asyncio, os
from conch.machine.threads import compute

assert asyncio.run(compute(divmod, 7, 2)) == (3, 1)
child = os.fork()
assert asyncio.run(compute(divmod, 7, 2)) == (3, 1)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_process_that_was_forked_has_threads_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60).returncode == 0
