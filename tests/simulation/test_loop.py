"""The simulated loop produces orders that asyncio permits, and the same order for the same seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.loop import NothingHappens, SimulatedLoop
from tests.simulation.virtual_time import VirtualClock

SEEDS = range(50)


def run(seed: int, work: Callable[[], Awaitable[list[object]]]) -> list[object]:
    loop = SimulatedLoop(VirtualClock(0), random.Random(seed))
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_callbacks_run_in_the_order_in_which_they_were_scheduled(seed: int) -> None:
    async def work() -> list[object]:
        order: list[object] = []
        loop = asyncio.get_running_loop()
        for number in range(10):
            loop.call_soon(order.append, number)
        await asyncio.sleep(1)
        return order

    assert run(seed, work) == list(range(10))


@pytest.mark.parametrize("seed", SEEDS)
def test_timers_run_in_the_order_of_their_deadlines(seed: int) -> None:
    async def work() -> list[object]:
        order: list[object] = []
        loop = asyncio.get_running_loop()
        for number in (3, 1, 2):
            loop.call_later(number, order.append, number)
        await asyncio.sleep(5)
        return order

    assert run(seed, work) == [1, 2, 3]


async def _two_calls_in_threads() -> list[object]:
    order: list[object] = []
    await asyncio.gather(*(asyncio.to_thread(order.append, name) for name in ("first", "second")))
    return order


def test_threads_are_as_fast_as_the_seed_says() -> None:
    orders = {tuple(run(seed, _two_calls_in_threads)) for seed in SEEDS}

    assert orders == {("first", "second"), ("second", "first")}


def test_a_seed_always_gives_the_same_order() -> None:
    assert all(run(seed, _two_calls_in_threads) == run(seed, _two_calls_in_threads) for seed in SEEDS)


def test_time_passes_only_while_nothing_can_run() -> None:
    async def work() -> list[object]:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(3600)
        return [round(loop.time() - before)]

    assert run(1, work) == [3600]


def test_a_wait_that_nothing_can_end_is_reported() -> None:
    async def work() -> list[object]:
        await asyncio.get_running_loop().create_future()
        return []

    with pytest.raises(NothingHappens):
        run(1, work)
