"""The work that an offloading process gets next, and the limits of the queue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from conch.core.errors import Code, ConchError
from conch.frontends.offloading.offloader import HUGE_BYTES, OffloadQueue


@dataclass(eq=False)
class Work:
    size: int


def queue(*sizes: int) -> OffloadQueue[Work]:
    waiting: OffloadQueue[Work] = OffloadQueue()
    for size in sizes:
        waiting.put(Work(size))
    return waiting


def taken(waiting: OffloadQueue[Work], *, smallest: bool) -> list[int]:
    sizes = []
    while (work := waiting.take(smallest=smallest)) is not None:
        sizes.append(work.size)
    return sizes


def test_the_first_process_takes_the_oldest_whatever_its_size() -> None:
    assert taken(queue(HUGE_BYTES, 1, 2 * HUGE_BYTES, 2), smallest=False) == [HUGE_BYTES, 1, 2 * HUGE_BYTES, 2]


def test_the_second_process_takes_the_smallest_and_no_giant() -> None:
    waiting = queue(HUGE_BYTES, 3, 2 * HUGE_BYTES, 2)
    assert taken(waiting, smallest=True) == [2, 3]
    assert [work.size for work in waiting] == [HUGE_BYTES, 2 * HUGE_BYTES]


def test_giants_that_fill_the_queue_leave_room_for_the_rest() -> None:
    waiting = queue()
    with pytest.raises(ConchError) as caught:
        for _ in range(10_000):
            waiting.put(Work(HUGE_BYTES))
    assert caught.value.code is Code.UNAVAILABLE
    giants = len(waiting)
    waiting.put(Work(1))
    assert len(waiting) == giants + 1
    with pytest.raises(ConchError):
        for _ in range(10_000):
            waiting.put(Work(1))
