"""Models of sequences and of text beside others that take the same resource."""

from __future__ import annotations

import asyncio

import pytest

from conch.core.inference import InferRequest
from conch.options.triton_values import Resource
from conch.server.execution.starting import WorkerPlacement
from conch.server.schedulers.rate_limiter import InstanceRateLimiter
from tests.unit.fake_clock import settle
from tests.unit.server.execution.test_limits_fuzz import Engine, OneModel, SequenceModel
from tests.unit.server.fakes import Answers, FakeWorker


async def send(model: OneModel, value: int = 0) -> InferRequest:
    request = model.request(value, Answers())
    model.dispatcher.submit(request)
    await settle()
    return request


async def finish(model: OneModel) -> None:
    next(worker for worker in model.workers if worker.batches).finish_batch()
    await settle()


def limiter(amount: int = 2) -> InstanceRateLimiter:
    return InstanceRateLimiter([Resource("R", amount, -1)])


async def test_sequence_waits_for_what_another_model_has_taken() -> None:
    shared = limiter()
    plain, taking = OneModel("a", 2, shared), SequenceModel("c", 2, shared, oldest=True, max_delay=0)
    plain_request = await send(plain)
    await send(plain)
    only = await send(taking, 5)
    assert plain_request in plain.running and not taking.running
    await finish(plain)
    assert taking.running == [only] and not plain.running
    await finish(taking)
    assert only.finished and not any(shared.taken.values())


async def test_engine_keeps_what_it_took_until_its_last_request_has_ended() -> None:
    shared = limiter()
    engine, plain = Engine("e", 2, shared), OneModel("a", 2, shared)
    await send(engine)
    await send(engine)
    assert len(engine.running) == 2
    await send(plain)
    await send(plain)
    await finish(engine)
    assert not plain.running
    await finish(engine)
    assert len(plain.running) == 2


async def test_engine_takes_no_more_requests_while_another_model_waits_for_what_it_has() -> None:
    shared = limiter()
    plain, engine = OneModel("a", 2, shared), Engine("e", 2, shared)
    await send(engine)
    await send(plain)
    await send(plain)
    later = await send(engine)
    assert later not in engine.running
    await finish(engine)
    assert plain.running and not engine.running
    await finish(plain)
    assert engine.running == [later]


class Unrepaired(OneModel):
    """A model whose workers are not replaced when they die."""

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("dies", [0, 1])
async def test_free_worker_runs_what_waits_when_the_other_one_dies(dies: int) -> None:
    shared = limiter()
    holding, waiting = OneModel("a", 2, shared), Unrepaired("b", 2, shared)
    await send(holding)
    await send(holding)
    requests = [await send(waiting), await send(waiting)]
    waiting.workers[dies].die()
    await settle()
    assert not waiting.running
    await finish(holding)
    assert waiting.running == requests and waiting.workers[1 - dies].batches
    await finish(waiting)
    await waiting.dispatcher.stop(0)


async def test_worker_that_dies_while_it_waits_for_its_turn_keeps_no_other_model_waiting() -> None:
    shared = limiter(3)
    holding, dying, small = OneModel("a", 2, shared), Unrepaired("b", 2, shared), OneModel("c", 1, shared)
    await send(holding)
    await send(holding)
    await send(dying)
    await send(dying)
    await send(small)
    await send(small)
    assert not small.running, "the other one comes first"
    for worker in list(dying.workers):
        worker.die()
    await settle()
    assert len(small.running) == 2
    await dying.dispatcher.stop(0)


async def test_what_a_retired_worker_of_sequences_needed_is_forgotten() -> None:
    shared = limiter()
    taking = SequenceModel("c", 2, shared, oldest=False, max_delay=0)
    await send(taking, 0)
    taking.dispatcher.keep([])
    await finish(taking)
    assert shared.pool
    await send(taking, 3)  # ends the sequence
    await finish(taking)
    await taking.dispatcher.finish_retiring()
    await settle()
    assert not shared.pool
