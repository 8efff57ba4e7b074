"""The budget of bytes in flight: which bodies wait, continue and are refused."""

import asyncio

from conch.core.errors import Code, ConchError
from conch.frontends.budget import STALL_TIMEOUT, ByteBudget
from tests.unit.fake_clock import fake_clock, settle


class Body:
    """A body that arrives in part; holds ``held`` bytes until it is refused, and ``more`` once it may continue."""

    def __init__(self, budget: ByteBudget, since: float, held: int, more: int = 0) -> None:
        self.budget, self.since, self.held, self.more = budget, since, held, more
        self.events: list[str] = []
        self.error: ConchError | None = None
        budget.take(held)

    def wait(self) -> None:
        self.waiting = self.budget.wait(self.since, self._go_on, self._refused)

    def end(self) -> None:
        self.budget.release(self.held)
        self.held = 0

    def _go_on(self) -> None:
        self.events.append("room")
        self.budget.take(self.more)
        self.held += self.more

    def _refused(self, error: ConchError) -> None:
        self.events.append("refused")
        self.error = error
        self.end()


def budget(size: int) -> ByteBudget:
    return ByteBudget(size, clock=asyncio.get_running_loop().time)


def test_bytes_are_counted_until_they_are_given_back() -> None:
    shared = ByteBudget(100)
    assert [shared.take(60), shared.take(40), shared.take(1)] == [True, True, False]
    shared.release(41)
    assert (shared.used, shared.take(10)) == (60, True)


def test_small_requests_stop_only_when_it_is_overdrawn() -> None:
    shared = ByteBudget(100)
    shared.take(125)
    assert not shared.overdrawn
    shared.take(1)
    assert shared.overdrawn


@fake_clock
async def test_the_oldest_continues_first_when_there_is_room() -> None:
    shared = budget(100)
    answered = Body(shared, 0, 60)
    younger, older = Body(shared, 2, 20), Body(shared, 1, 20)
    younger.wait()
    older.wait()
    await settle()
    assert older.events == younger.events == []
    answered.end()
    await settle()
    # Each may read a turn's bytes before there is room for the next.
    assert (older.events, younger.events) == (["room"], [])
    await asyncio.sleep(1)
    assert younger.events == ["room"]


@fake_clock
async def test_half_received_bodies_do_not_wait_for_each_other_for_ever() -> None:
    shared = budget(100)
    bodies = [Body(shared, since, 25, more=25) for since in range(4)]
    for body in reversed(bodies):
        body.wait()
    await asyncio.sleep(STALL_TIMEOUT - 1)
    assert [body.events for body in bodies] == [[], [], [], []]
    await asyncio.sleep(2)
    # The youngest is refused, and its bytes let the oldest continue.
    assert [body.events for body in bodies] == [["room"], [], [], ["refused"]]
    error = bodies[3].error
    assert error is not None
    assert error.code is Code.UNAVAILABLE
    assert "--max-bytes-in-flight allows 100" in error.message
    assert shared.refused == 1


@fake_clock
async def test_all_are_refused_while_nothing_is_given_back() -> None:
    shared = budget(100)
    shared.take(100)
    bodies = [Body(shared, since, 0) for since in range(3)]
    for body in bodies:
        body.wait()
    await asyncio.sleep(STALL_TIMEOUT + 1)
    assert [body.events for body in bodies] == [["refused"]] * 3


@fake_clock
async def test_who_is_gone_is_not_called() -> None:
    shared = budget(100)
    shared.take(100)
    body = Body(shared, 0, 0)
    body.wait()
    shared.cancel(body.waiting)
    shared.cancel(body.waiting)
    shared.release(50)
    await asyncio.sleep(STALL_TIMEOUT + 1)
    assert body.events == []


@fake_clock
async def test_one_who_was_let_go_may_wait_again_at_once() -> None:
    shared = budget(100)
    shared.take(100)
    turns: list[float] = []

    def wait() -> None:
        turns.append(asyncio.get_running_loop().time())
        if len(turns) < 3:
            shared.wait(0, wait, refused)

    def refused(error: ConchError) -> None:
        turns.append(-1)

    shared.wait(0, wait, refused)
    shared.release(1)
    await asyncio.sleep(STALL_TIMEOUT)
    assert len(turns) == 3
    assert -1 not in turns


def test_a_quarter_of_the_memory_is_the_default() -> None:
    assert ByteBudget.of(0).size > 64 << 20
    assert ByteBudget.of(12).size == 12
