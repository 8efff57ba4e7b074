"""Workers that die and are restarted, by a clock that jumps and with processes that do what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conch.core.errors import ConchError, internal
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import BACK_OFF, HEALTHY_SECONDS, RestartBackOff, SupervisedWorker
from conch.telemetry.statistics import RestartReason
from tests.unit.fake_clock import fake_clock, settle
from tests.unit.server.fakes import FakeWorker


class Supervision:
    """A supervised worker and its owner; notes when processes are launched, and what the owner hears."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.heard: list[str] = []
        self.adapters: dict[str, str] = {}
        self.launched: list[float] = []
        self.processes: list[FakeWorker] = [FakeWorker()]
        self.failures = 0  # how many of the next launches fail
        self.failure: Exception = internal("no memory")
        self.held: asyncio.Future[None] | None = None
        self.given_up = 0  # launches that were cancelled
        self.worker = SupervisedWorker(WorkerPlacement("m_0", "CPU"), self.launch, self)  # type: ignore[arg-type]
        self.worker.adopt(self.process)  # type: ignore[arg-type]

    @property
    def process(self) -> FakeWorker:
        return self.processes[-1]

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        self.launched.append(self.loop.time())
        if self.held is not None:
            try:
                await self.held
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        if self.failures:
            self.failures -= 1
            raise self.failure
        self.processes.append(FakeWorker())
        return self.process

    async def die(self) -> None:
        """The process dies; returns when another one has taken its place."""
        self.process.die()
        while not self.worker.ready:
            await asyncio.sleep(0.001)

    def on_available(self, worker: SupervisedWorker) -> None:
        self.heard.append("available")

    def on_died(self, worker: SupervisedWorker, reason: RestartReason) -> None:
        self.heard.append(reason.value)

    def on_lost(self, worker: SupervisedWorker) -> None:
        self.heard.append("lost")

    def on_progress(self, pid: int, progress: Any) -> None:
        self.heard.append("progress")

    def on_prepared(self) -> None: ...

    def on_response_sent(self, request: Any, response: Any) -> None: ...


def gaps(times: list[float]) -> list[float]:
    return [round(later - earlier, 1) for earlier, later in zip([0.0, *times], times, strict=False)]


def test_delays_grow_to_the_last_one_and_repeat_it() -> None:
    back_off = RestartBackOff()
    assert [back_off.next_delay() for _ in range(len(BACK_OFF) + 2)] == [*BACK_OFF, BACK_OFF[-1], BACK_OFF[-1]]


@pytest.mark.parametrize(("lived", "delay"), [(HEALTHY_SECONDS, BACK_OFF[1]), (HEALTHY_SECONDS + 0.1, BACK_OFF[0])])
def test_only_a_worker_that_lived_long_enough_is_restarted_at_once(lived: float, delay: float) -> None:
    back_off = RestartBackOff()
    back_off.next_delay()
    back_off.started(100.0)
    back_off.died(100.0 + lived)
    assert back_off.next_delay() == delay


@fake_clock
async def test_worker_that_dies_three_times_waits_longer_each_time() -> None:
    supervision = Supervision()
    for _ in range(3):
        await supervision.die()
    assert gaps(supervision.launched) == [0.0, 0.5, 1.0]


@fake_clock
async def test_new_worker_gets_the_adapters_that_clients_have_loaded() -> None:
    supervision = Supervision()
    supervision.adapters["pirate"] = "adapters/pirate"
    assert supervision.process.adapters == {}
    await supervision.die()
    assert supervision.process.adapters == {"pirate": "adapters/pirate"}


@fake_clock
async def test_worker_that_lived_for_long_is_restarted_at_once_again() -> None:
    supervision = Supervision()
    for _ in range(3):
        await supervision.die()
    await asyncio.sleep(HEALTHY_SECONDS + 1)
    died = supervision.loop.time()
    await supervision.die()
    assert supervision.launched[-1] == pytest.approx(died)


@pytest.mark.parametrize("failure", [internal("no memory"), OSError("no process"), KeyError("a bug")])
@fake_clock
async def test_attempts_that_fail_are_told_and_repeated_until_one_succeeds(failure: Exception) -> None:
    supervision = Supervision()
    supervision.failures, supervision.failure = 2, failure
    await supervision.die()
    assert gaps(supervision.launched) == [0.0, 0.5, 1.0]
    assert supervision.heard == ["available", "progress", "sigkill", "lost", "lost", "available"]


@fake_clock
async def test_process_that_died_before_it_was_taken_over_is_replaced() -> None:
    supervision = Supervision()
    dead = FakeWorker()
    dead.alive = False
    supervision.worker.adopt(dead)  # type: ignore[arg-type]
    assert not supervision.worker.ready
    await settle()
    assert supervision.worker.ready and len(supervision.launched) == 1


@fake_clock
async def test_worker_that_dies_while_it_retires_is_not_replaced() -> None:
    supervision = Supervision()
    process = supervision.process
    finished = supervision.loop.create_future()
    process.finish = lambda: finished  # type: ignore[method-assign, assignment, return-value]
    retiring = asyncio.create_task(supervision.worker.retire())
    await settle()
    assert not process.stopped
    process.die()
    finished.set_result(None)
    await retiring
    await asyncio.sleep(100)
    assert supervision.launched == []


@fake_clock
async def test_stop_ends_the_wait_for_the_next_attempt() -> None:
    supervision = Supervision()
    supervision.failures = 1
    supervision.process.die()
    await settle()
    await supervision.worker.stop(0)
    await asyncio.sleep(100)
    assert len(supervision.launched) == 1


@fake_clock
async def test_stop_cancels_a_launch_that_is_in_progress() -> None:
    supervision = Supervision()
    supervision.held = supervision.loop.create_future()
    supervision.process.die()
    await settle()
    await supervision.worker.stop(0)
    assert supervision.given_up == 1 and not supervision.worker.ready


@fake_clock
async def test_reason_why_a_worker_cannot_be_restarted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    supervision = Supervision()
    supervision.held = supervision.loop.create_future()
    supervision.held.set_exception(ConchError("no device"))
    supervision.process.die()
    await settle()
    assert "worker of 'm_0' could not be started again: Internal: no device" in caplog.text
    await supervision.worker.stop(0)
