"""Requests that wait for their models, and models that make room for others."""

from __future__ import annotations

import asyncio

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest
from conch.core.tensors import WireTensor
from conch.server.bls import BlsModels
from conch.server.model import Model
from conch.server.models.capacity import Capacity, CapacityLimits, Phase
from conch.server.models.on_demand import LoadNeeded
from tests.unit.fake_clock import fake_clock, settle
from tests.unit.server.demands import Market
from tests.unit.server.fakes import Answers

ONE = CapacityLimits(Capacity(models=1), min_loaded=10, wait=60)
TWO = CapacityLimits(Capacity(models=2), min_loaded=10, wait=60)


@fake_clock
async def test_requests_wait_for_the_load_and_run_in_their_order() -> None:
    market = Market(ONE)
    asked = [market.submit("a") for _ in range(3)]
    await asyncio.sleep(0.9)
    assert market.lifecycle.log == ["load a"] and not any(one.refused for one in asked)
    await asyncio.sleep(0.2)
    executor = market.table.find("a").executor
    assert executor.requests == [one.request for one in asked]  # type: ignore[attr-defined]


@fake_clock
async def test_model_that_is_not_used_makes_room_for_the_one_that_is_asked_for() -> None:
    market = Market(ONE)
    await market.load("a")
    market.submit("b")
    await asyncio.sleep(1.5)
    assert market.lifecycle.log == ["load a", "unload a", "load b"]
    assert market.running("b") == 1


@fake_clock
async def test_model_with_requests_makes_room_when_it_has_answered_them() -> None:
    market = Market(ONE)
    first = market.submit("a")
    await asyncio.sleep(1.5)
    market.submit("b")
    await asyncio.sleep(5)
    assert market.lifecycle.log == ["load a"]
    market.answer("a")
    await settle()
    assert first.answers.finals == 1 and market.lifecycle.log == ["load a", "unload a", "load b"]


@fake_clock
async def test_model_that_always_has_requests_takes_no_new_ones_after_its_turn_and_answers_those_it_has() -> None:
    market = Market(ONE)
    first = market.submit("a")
    await asyncio.sleep(1.5)
    market.submit("b")
    await asyncio.sleep(10.1)
    assert market.lifecycle.log == ["load a", "unload a"]
    second = market.submit("a")
    model = market.table.models["a"].versions[1].model
    assert model is not None and model.in_flight == 1 and not model.stopping
    model.executor.requests[0].fail(ConchError("answered"))  # type: ignore[attr-defined]
    await settle()
    assert first.answers.finals == 1
    await asyncio.sleep(1.5)
    assert market.running("b") == 1
    market.answer("b")
    await asyncio.sleep(1.5)
    assert market.running("a") == 1 and second.refused is None


@fake_clock
async def test_request_that_finds_a_model_about_to_leave_is_served() -> None:
    market = Market(ONE)
    await market.load("a")
    market.submit("b")
    asked = market.submit("a")  # before the decision, which takes a turn of the loop
    await asyncio.sleep(5)
    assert market.running("a") == 1 and asked.refused is None


@fake_clock
async def test_work_that_holds_its_model_a_turn_later_finds_it_loaded() -> None:
    market = Market(ONE)
    held: list[bool] = []

    async def decode() -> None:
        model = market.model("a")
        with model.held():
            held.append(not model.stopping)

    def proceed(error: ConchError | None) -> None:
        assert error is None
        market.model("a")
        asyncio.get_running_loop().create_task(decode())

    with pytest.raises(LoadNeeded) as caught:
        market.model("a")
    caught.value.then(proceed)
    market.submit("b")
    await asyncio.sleep(1.01)
    assert held == [True]


@fake_clock
async def test_request_that_waits_too_long_is_refused_and_others_are_not() -> None:
    market = Market(ONE)
    market.lifecycle.seconds = 70
    early = market.submit("a")
    await asyncio.sleep(30)
    late = market.submit("a")
    await asyncio.sleep(31)
    assert early.refused is not None and early.refused.code is Code.UNAVAILABLE
    assert early.refused.message.startswith(
        "model 'a' was not loaded within 60 s (--load-wait-secs): its load has taken"
    )
    await asyncio.sleep(10)
    assert late.refused is None and market.running("a") == 1


@fake_clock
async def test_client_that_cancels_is_forgotten() -> None:
    market = Market(ONE)
    await market.load("a")
    market.submit("a")
    asked = market.submit("b")
    await settle()
    asked.give_up()
    market.answer("a")
    await asyncio.sleep(5)
    assert market.lifecycle.log == ["load a"] and market.demand.planner.waiting() == 0


@fake_clock
async def test_load_that_fails_fails_all_that_wait_and_is_not_tried_for_every_request() -> None:
    market = Market(ONE)
    market.lifecycle.broken.add("a")
    asked = [market.submit("a") for _ in range(2)]
    await asyncio.sleep(1.5)
    assert [one.refused.status for one in asked if one.refused] == [
        "Unavailable: load failed for model 'a': broken"
    ] * 2
    again = market.submit("a")
    assert again.refused is not None
    assert again.refused.message == (
        "model 'a' failed to load, and is tried again in 1 s: load failed for model 'a': broken"
    )
    assert not market.demand.can_serve("a")
    await asyncio.sleep(1)
    market.lifecycle.broken.clear()
    market.submit("a")
    await asyncio.sleep(1.5)
    assert market.lifecycle.log == ["load a"] * 2 and market.running("a") == 1


@fake_clock
async def test_model_that_is_not_in_the_repository_is_not_found() -> None:
    market = Market(ONE)
    asked = market.submit("nobody")
    await settle()
    assert asked.refused is not None
    assert asked.refused.status == "Not found: Request for unknown model: 'nobody' is not found"


@fake_clock
async def test_version_that_a_loaded_model_does_not_have_is_not_waited_for() -> None:
    market = Market(ONE)
    await market.load("a")
    with pytest.raises(ConchError, match="'a' version 7 is not found") as caught:
        market.model("a", 7)
    assert not isinstance(caught.value, LoadNeeded)


@fake_clock
async def test_pinned_model_stays() -> None:
    market = Market(TWO, pinned=("a",))
    await market.load("a", "b")
    market.submit("c")
    await asyncio.sleep(1.5)
    assert "unload b" in market.lifecycle.log and "unload a" not in market.lifecycle.log


@pytest.mark.parametrize("loaded", [True, False])
@fake_clock
async def test_model_is_loaded_again_by_the_first_request_after_an_unload(loaded: bool) -> None:
    market = Market(ONE)
    if loaded:
        await market.load("a")
    else:  # the unload ends the load
        market.submit("a")
        await asyncio.sleep(0.2)
    await market.demand.unload("a", False)
    await settle()
    market.submit("a")
    await asyncio.sleep(1.5)
    assert market.running("a") == 1


@fake_clock
async def test_request_that_comes_while_its_model_is_being_unloaded_by_hand_waits_for_the_next_load() -> None:
    market = Market(ONE)
    await market.load("a")
    first = market.submit("a")
    await market.demand.unload("a", False)
    second = market.submit("a")
    await asyncio.sleep(5)
    assert market.lifecycle.log == ["load a", "unload a"]
    first.request.fail(ConchError("answered"))
    await asyncio.sleep(1.5)
    assert market.running("a") == 1 and second.refused is None


@pytest.mark.parametrize("broken", [False, True])
@fake_clock
async def test_load_by_name_during_a_load_ends_when_files_that_were_written_since_are_served(broken: bool) -> None:
    market = Market(ONE)
    if broken:
        market.lifecycle.broken.add("a")
    market.submit("a")
    await asyncio.sleep(0.5)
    market.lifecycle.broken.clear()
    market.lifecycle.files = 2
    await market.demand.load("a", {})
    assert market.lifecycle.served == {"a": 2} and market.lifecycle.log == ["load a"] * 2


@fake_clock
async def test_idle_model_that_is_being_reloaded_leaves_when_its_reload_has_ended() -> None:
    market = Market(ONE)
    await market.load("a")
    market.lifecycle.seconds = 3
    reloading = asyncio.create_task(market.demand.load("a", {}))
    await asyncio.sleep(1)
    market.submit("b")
    await asyncio.sleep(1)
    assert market.lifecycle.log == ["load a", "load a"]
    await reloading
    await asyncio.sleep(4)
    assert market.lifecycle.log == ["load a", "load a", "unload a", "load b"]
    assert market.running("b") == 1


@fake_clock
async def test_load_by_name_that_fails_twice_says_why() -> None:
    market = Market(ONE)
    market.lifecycle.broken.add("a")
    market.submit("a")
    await asyncio.sleep(0.5)
    with pytest.raises(ConchError, match="load failed for model 'a': broken"):
        await market.demand.load("a", {})
    assert market.lifecycle.log == ["load a"] * 2


@fake_clock
async def test_unload_during_a_load_fails_what_waits_for_it_and_the_next_request_loads_the_model_again() -> None:
    market = Market(ONE)
    first = market.submit("a")
    await asyncio.sleep(0.2)
    unload = asyncio.create_task(market.demand.unload("a", False))
    await asyncio.sleep(0.1)
    second = market.submit("a")
    await asyncio.sleep(2)
    assert unload.done() and first.refused is not None
    assert first.refused.message == "load failed for model 'a': the model was unloaded during the load"
    assert market.lifecycle.log == ["load a", "unload a", "load a"]
    assert market.running("a") == 1 and second.refused is None


@fake_clock
async def test_step_that_is_unloaded_during_the_load_of_its_ensemble_loads_again_while_that_stalls() -> None:
    market = Market(TWO)
    market.footprints.step_models["all"] = ["a", "b"]
    market.submit("all")
    await asyncio.sleep(1.2)
    unload = asyncio.create_task(market.demand.unload("a", False))
    market.lifecycle.seconds = 50
    await asyncio.sleep(1)
    assert unload.done() and market.lifecycle.log == ["load all", "load a", "unload a", "load b"]
    market.lifecycle.seconds = 1
    asked = market.submit("a")
    await asyncio.sleep(1.5)
    assert market.running("a") == 1 and asked.refused is None


@fake_clock
async def test_model_that_is_loaded_again_before_its_first_load_has_ended_is_loaded_once() -> None:
    market = Market(ONE)
    market.lifecycle.afterwards = 10
    await market.load("a", "b")
    market.lifecycle.seconds = 50
    market.submit("a")
    await asyncio.sleep(40)
    assert market.lifecycle.log == ["load a", "unload a", "load b", "unload b", "load a"]


@fake_clock
async def test_load_by_name_of_a_model_that_is_about_to_leave_ends_when_it_is_loaded_again() -> None:
    market = Market(ONE)
    await market.load("a")
    market.submit("b")
    while market.demand.planner.phase("a") is Phase.LOADED:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(1.5, market.answer, "b")
    await market.demand.load("a", {})
    assert market.lifecycle.log == ["load a", "unload a", "load b", "unload b", "load a"]


@fake_clock
async def test_later_requests_do_not_overtake_those_that_waited_for_the_load() -> None:
    market = Market(ONE)
    market.lifecycle.afterwards = 0.5
    early = [market.submit("a") for _ in range(2)]
    await asyncio.sleep(1.1)
    late = market.submit("a")
    await asyncio.sleep(1)
    executor = market.table.find("a").executor
    assert executor.requests == [one.request for one in (*early, late)]  # type: ignore[attr-defined]


@fake_clock
async def test_request_that_is_cancelled_when_an_earlier_one_continues_is_not_sent() -> None:
    market = Market(ONE)
    gone: list[str] = []
    with pytest.raises(LoadNeeded) as caught:
        market.model("a")
    caught.value.then(lambda error: give_up_second())  # as a stream does whose first request ends it
    give_up_second = caught.value.then(lambda error: gone.append("second"))
    await asyncio.sleep(1.5)
    assert gone == [] and market.table.find("a").ready


@fake_clock
async def test_files_that_cannot_be_read_fail_what_waits() -> None:
    market = Market(ONE)
    market.footprints.broken.add("a")
    asked = market.submit("a")
    await settle()
    assert asked.refused is not None and asked.refused.code is Code.UNAVAILABLE
    assert asked.refused.message == "load failed for model 'a': RuntimeError('the disk is on fire')"


@fake_clock
async def test_loaded_models_are_measured_again_after_a_measurement_that_failed() -> None:
    market = Market(CapacityLimits(Capacity(memory=100), min_loaded=10, wait=60))
    await market.load("a", "b")
    market.footprints.failures = 3
    market.demand.start(poll_seconds=1000)
    market.footprints.memory = 80
    await asyncio.sleep(30)
    assert "unload a" in market.lifecycle.log
    await market.demand.close()


@fake_clock
async def test_load_by_name_is_refused_when_the_server_stops_while_its_directory_is_looked_for() -> None:
    market = Market(ONE)
    load = asyncio.ensure_future(market.demand.load("a", {}))
    await market.demand.close()
    with pytest.raises(ConchError, match="the server is stopping and loads no models"):
        await load


@fake_clock
async def test_what_waits_is_refused_when_the_server_stops() -> None:
    market = Market(ONE)
    market.lifecycle.seconds = 30
    asked = market.submit("a")
    await settle()
    await market.demand.close()
    assert asked.refused is not None and asked.refused.message == "the server is stopping and loads no models"
    late = market.submit("a")
    assert late.refused is not None and late.refused.status == "Unavailable: the server is stopping and loads no models"


@fake_clock
async def test_request_of_a_model_waits_for_the_model_that_it_calls() -> None:
    market = Market(ONE)
    models, answers = BlsModels(market), Answers()  # type: ignore[arg-type]
    models.infer(InferRequest("a", {"x": WireTensor("x", "FP32", (1,), bytes(4))}, answers), False, "caller")
    await asyncio.sleep(1.5)
    assert market.running("a") == 1
    market.answer("a")
    assert answers.finals == 1


@fake_clock
async def test_load_that_a_model_requests_is_known_to_come_from_a_model() -> None:
    market = Market(TWO)
    await market.demand.load("a", {}, by_model=True)
    await market.demand.load("b", {})
    assert market.lifecycle.by_model == ["a"]


@fake_clock
async def test_load_after_a_model_stopped_waiting_for_it_takes_a_load_slot_again() -> None:
    market = Market(ONE)
    await market.load("a")
    market.submit("a")  # busy: no other model fits
    request = InferRequest("b", {"x": WireTensor("x", "FP32", (1,), bytes(4))}, Answers())
    BlsModels(market).infer(request, False, "caller")  # type: ignore[arg-type]
    await settle()
    request.cancel()
    market.answer("a")
    await market.load("b")
    assert market.lifecycle.log[-1] == "load b" and market.lifecycle.by_model == []


@pytest.mark.parametrize("late", [False, True])
@fake_clock
async def test_model_that_a_loaded_model_calls_comes_before_those_that_wait_for_more_capacity(late: bool) -> None:
    market = Market(TWO)
    market.footprints.step_models["e"] = ["a", "b"]
    await market.load("caller", "idle")
    calling = market.submit("caller")
    market.submit("e")
    await asyncio.sleep(15 if late else 0)  # late: the caller already leaves, to make room for the ensemble
    answers = Answers()
    request = InferRequest("c", {"x": WireTensor("x", "FP32", (1,), bytes(4))}, answers)
    BlsModels(market).infer(request, False, "caller")  # type: ignore[arg-type]
    await asyncio.sleep(15)
    assert market.running("c") == 1 and calling.refused is None
    request.fail(ConchError("answered"))
    calling.request.fail(ConchError("answered"))
    await asyncio.sleep(25)
    assert market.running("e") == 1


@fake_clock
async def test_request_of_a_model_that_is_cancelled_waits_no_longer() -> None:
    market = Market(ONE)
    market.lifecycle.seconds = 30
    answers = Answers()
    request = InferRequest("a", {"x": WireTensor("x", "FP32", (1,), bytes(4))}, answers)
    BlsModels(market).infer(request, False, "caller")  # type: ignore[arg-type]
    request.cancel()
    assert answers.error is not None and answers.error.code is Code.CANCELLED
    assert market.demand.planner.waiting() == 0


@fake_clock
async def test_request_of_a_model_to_one_that_cannot_be_loaded_fails() -> None:
    market = Market(ONE)
    market.lifecycle.broken.add("a")
    answers = Answers()
    BlsModels(market).infer(InferRequest("a", {}, answers), False, "caller")  # type: ignore[arg-type]
    await asyncio.sleep(1.5)
    assert answers.error is not None
    assert answers.error.message == "Failed for execute the inference request. Model 'a' is not ready."


@fake_clock
async def test_request_of_a_model_that_is_refused_after_the_load_fails() -> None:
    market = Market(ONE)
    answers = Answers()
    BlsModels(market).infer(InferRequest("a", {}, answers), False, "caller")  # type: ignore[arg-type]
    await asyncio.sleep(1.5)
    assert answers.finals == 1
    assert answers.error is not None and "expected 1 inputs but got 0" in answers.error.message


@fake_clock
async def test_request_of_a_model_that_fails_unexpectedly_after_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    market = Market(ONE)
    answers = Answers()
    BlsModels(market).infer(InferRequest("a", {}, answers), False, "caller")  # type: ignore[arg-type]

    def broken(name: str, version: int = -1) -> Model:
        raise RuntimeError("a bug")

    monkeypatch.setattr(market, "model", broken)
    await asyncio.sleep(1.5)
    assert answers.error is not None and answers.error.message == "RuntimeError: a bug"


@fake_clock
async def test_caller_that_awaits_a_model_gets_the_reason_why_it_cannot_be_loaded() -> None:
    market = Market(ONE)
    market.lifecycle.broken.add("a")
    with pytest.raises(LoadNeeded) as caught:
        market.model("a")
    with pytest.raises(ConchError, match="load failed for model 'a': broken"):
        await caught.value.wait()
