"""The share that connections have of each turn of the event loop."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from conch.frontends.loop_budget import SHARE, EventLoopBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_turn_is_over_when_its_share_is_used_up():
    clock = Clock()
    turns = EventLoopBudget(asyncio.get_running_loop(), clock)
    assert not turns.over()
    clock.now += SHARE / 2
    assert not turns.over()
    clock.now += SHARE / 2
    assert turns.over()
    await asyncio.sleep(0)
    assert not turns.over()


async def test_deferred_work_is_done_in_order_and_some_of_it_in_every_turn():
    clock = Clock()
    turns = EventLoopBudget(asyncio.get_running_loop(), clock)
    done: list[int] = []

    def work(number: int) -> None:
        clock.now += SHARE * 2
        done.append(number)
        if number < 3:
            turns.later(lambda: work(number + 10))

    for number in range(1, 4):
        turns.later(lambda number=number: work(number))
    seen = []
    while len(done) < 5:
        await asyncio.sleep(0)
        seen.append(len(done))
    assert done == [1, 2, 3, 11, 12]
    # Never more than one of them, because each uses up a whole share.
    assert all(later - earlier <= 1 for earlier, later in pairwise(seen))


async def test_several_small_pieces_are_done_in_one_turn():
    turns = EventLoopBudget(asyncio.get_running_loop(), Clock())
    done: list[int] = []
    for number in range(100):
        turns.later(lambda number=number: done.append(number))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == list(range(100))
