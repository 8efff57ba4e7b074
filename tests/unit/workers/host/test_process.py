"""What the server makes of a worker's frames and of its end, with a worker that does what the test says."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from time import monotonic_ns
from typing import Any
from weakref import ref

import pytest

from conch.core.errors import Code, ConchError
from conch.core.tensors import WireTensor
from conch.workers.host.execution import Execution
from conch.workers.host.liveness import DEFAULT_WORKER_TIMEOUTS, Cause
from conch.workers.host.process import WorkerProcess
from tests.unit.fake_clock import FakeClockLoop, fake_clock, settle
from tests.unit.workers.host.fakes import EMPTY, Client, make_process

UNHEALTHY = "Stub process 'm_0' is not healthy."


def ignore(execution: Execution) -> None: ...


def run(process: WorkerProcess, count: int = 1, on_done: Callable[[Execution], None] = ignore) -> list[Client]:
    clients = [Client() for _ in range(count)]
    process.execute([client.request for client in clients], on_done)
    return clients


@fake_clock
async def test_batch_is_done_before_its_requests_are_answered() -> None:
    process, child = make_process()
    order: list[Any] = []
    clients = run(process, 2, lambda execution: order.append((execution.times, [client.finals for client in clients])))
    assert [len(header["requests"]) for header in child.received()] == [2]
    child.done(1, EMPTY, EMPTY)
    await settle()
    assert order == [((1, 2, 3), [0, 0])]
    assert [(client.finals, client.errors) for client in clients] == [(1, [])] * 2
    assert process.idle


@fake_clock
async def test_what_is_to_be_said_once_is_said_once_by_all_workers_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    said: set[str] = set()
    for _ in range(2):
        process, child = make_process()
        process.said = said
        for _ in range(2):
            child.send({"op": "log", "level": "WARNING", "file": "f", "line": 1, "message": "hot", "once": True})
            child.send({"op": "log", "level": "WARNING", "file": "f", "line": 1, "message": "cold"})
        await settle()
    assert sorted(caplog.messages) == ["cold"] * 4 + ["hot"]


@fake_clock
async def test_error_of_a_batch_ends_all_its_requests() -> None:
    process, child = make_process()
    clients = run(process, 2)
    child.send({"op": "done", "batch": 1, "times": [0, 0, 0], "error": ["INTERNAL", "bad"]})
    await settle()
    assert [(client.finals, client.errors) for client in clients] == [(1, ["bad"])] * 2


@fake_clock
async def test_request_that_is_answered_later_ends_with_its_last_response_once() -> None:
    sent: list[int] = []
    process, child = make_process(on_response_sent=lambda request, response: sent.append(request.serial))
    (client,) = run(process)
    child.done(1, None)
    child.respond(client.request, final=False)
    await settle()
    assert (len(client.responses), client.finals, process.idle) == (1, 0, False)
    child.respond(client.request)
    child.respond(client.request)  # one too many
    await settle()
    assert (len(client.responses), client.finals, process.idle) == (2, 1, True)
    assert len(sent) == 2


@fake_clock
async def test_death_ends_every_request_exactly_once_and_is_reported_last() -> None:
    process, child = make_process()
    told: list[list[int]] = []
    executed, decoupled, untouched = run(process), run(process), run(process)
    everyone = [*executed, *decoupled, *untouched]
    process.on_exit = lambda process: told.append([client.finals for client in everyone])
    child.done(1, EMPTY)
    child.done(2, None)
    await settle()
    child.exit(-11)
    assert [(client.finals, client.errors) for client in everyone] == [(1, []), (1, [UNHEALTHY]), (1, [UNHEALTHY])]
    assert told == [[1, 1, 1]]
    assert (process.alive, process.idle, process.exit_status) == (False, True, -11)


@fake_clock
async def test_what_was_sent_before_death_is_delivered() -> None:
    process, child = make_process()
    (client,) = run(process)
    child.done(1, EMPTY)
    child.exit(1)
    assert (client.finals, client.errors) == (1, [])


@fake_clock
async def test_batch_for_a_dead_worker_fails_at_once() -> None:
    process, child = make_process()
    child.exit(1)
    (client,) = run(process)
    assert client.errors == [UNHEALTHY]
    with pytest.raises(ConchError, match="not healthy"):
        await process.ask({"op": "complete"})


@fake_clock
async def test_worker_that_dies_before_it_has_answered_fails_the_load_with_its_end() -> None:
    process, child = make_process(loading=True)
    asking = asyncio.create_task(process.ask({"op": "start"}))
    await settle()
    child.exit(-9)
    with pytest.raises(ConchError) as failed:
        await asking
    assert failed.value.message == f"{UNHEALTHY} It was killed by SIGKILL, possibly because memory ran out."


@fake_clock
async def test_answer_that_says_failed_is_raised_with_its_code() -> None:
    process, child = make_process()
    asking = asyncio.create_task(process.ask({"op": "complete"}))
    await settle()
    child.send({"op": "failed", "error": ["INVALID_ARG", "no such input: fix it", "no such input"]})
    with pytest.raises(ConchError, match="no such input") as failed:
        await asking
    error = failed.value
    assert (error.code, error.message, error.public) == (Code.INVALID_ARG, "no such input: fix it", "no such input")


@fake_clock
async def test_an_unanswered_question_of_a_model_does_not_make_it_ready() -> None:
    process, child = make_process()
    asking = asyncio.create_task(process.ask({"op": "start"}))
    await settle()
    child.send({"op": "metric_control", "call": 1, "do": "value", "number": 1})
    with pytest.raises(ConchError, match="not healthy"):
        await asking
    assert child.kills == 1


@fake_clock
async def test_only_a_request_that_runs_is_cancelled_in_the_worker() -> None:
    process, child = make_process()
    running, ended = run(process), run(process)
    child.done(2, EMPTY)
    await settle()
    child.received()
    for client in [*running, *ended]:
        client.request.cancel()
    assert child.received() == [{"op": "cancel", "serial": running[0].request.serial}]
    child.done(1, {**EMPTY, "error": ["CANCELLED", "given up"]})
    await settle()
    assert running[0].finals == 1


@fake_clock
async def test_worker_that_stops_in_time_is_not_killed() -> None:
    process, child = make_process(on_exit=lambda process: pytest.fail("this end was asked for"))
    stopping = asyncio.create_task(process.stop())
    await settle()
    assert [header["op"] for header in child.received()] == ["stop"]
    await asyncio.sleep(DEFAULT_WORKER_TIMEOUTS.finalize - 1)
    assert not stopping.done()
    child.exit(0)
    await stopping
    assert child.kills == 0


@fake_clock
async def test_worker_that_does_not_stop_is_killed_at_its_deadline() -> None:
    process, child = make_process(on_exit=lambda process: pytest.fail("this end was asked for"))
    (client,) = run(process)
    begun = asyncio.get_running_loop().time()
    await process.stop()
    assert asyncio.get_running_loop().time() - begun == pytest.approx(DEFAULT_WORKER_TIMEOUTS.finalize)
    assert (child.kills, client.finals) == (1, 1)
    assert client.errors == [
        f"{UNHEALTHY} It was killed: its requests did not complete in time "
        "(--unload-timeout-secs, --exit-timeout-secs)."
    ]


@fake_clock
async def test_stop_of_a_worker_that_has_died_returns_at_once() -> None:
    process, child = make_process()
    child.exit(1)
    await process.stop()
    assert asyncio.get_running_loop().time() == 0.0


@fake_clock
async def test_finish_waits_for_the_last_response_of_the_last_request() -> None:
    process, child = make_process()
    (client,) = run(process)
    finishing = asyncio.create_task(process.finish())
    child.done(1, None)
    await settle()
    assert not finishing.done()
    child.respond(client.request)
    await finishing


@fake_clock
async def test_finish_ends_with_the_worker() -> None:
    process, child = make_process()
    run(process)
    finishing = asyncio.create_task(process.finish())
    await settle()
    child.exit(1)
    await finishing


@pytest.mark.parametrize(
    "header",
    [
        {"op": "done", "batch": 99, "times": [0, 0, 0], "responses": []},
        {"op": "done", "batch": 1, "times": [0, 0, 0], "responses": []},
        {"op": "response"},
        {"op": "release", "regions": [7]},
    ],
)
@fake_clock
async def test_worker_that_breaks_the_protocol_is_killed(header: dict[str, Any]) -> None:
    process, child = make_process()
    ended: list[Execution] = []
    (client,) = run(process, on_done=ended.append)
    child.send(dict(header))
    await settle()
    assert (child.kills, client.finals, client.errors, len(ended)) == (1, 1, [UNHEALTHY], 1)


@fake_clock
async def test_worker_that_closes_its_channel_is_killed() -> None:
    process, child = make_process()
    (client,) = run(process)
    child.connection.shutdown(socket.SHUT_RDWR)
    await settle()
    assert (child.kills, client.errors) == (1, [UNHEALTHY])


@fake_clock
async def test_text_before_the_response_is_only_for_clients_that_want_it() -> None:
    process, child = make_process()
    plain, streaming = Client(), Client()
    texts: list[str] = []
    streaming.request.on_text = texts.append
    for client in (plain, streaming):
        process.execute([client.request], ignore)
    described = [header["requests"][0].get("preview", False) for header in child.received()]
    assert described == [False, True]
    for client in (plain, streaming):
        child.send({"op": "text", "serial": client.request.serial, "text": "one"})
    child.send({"op": "text", "serial": 99, "text": "of a request that has ended"})
    await settle()
    assert (texts, plain.responses, streaming.responses, child.kills) == (["one"], [], [], 0)
    streaming.request.on_text = int  # a client that fails
    child.send({"op": "text", "serial": streaming.request.serial, "text": "one"})
    await settle()
    assert (child.kills, streaming.errors) == (0, [])
    child.exit(1)


@fake_clock
async def test_prepared_request_is_executed_by_its_number_alone() -> None:
    told: list[str] = []
    process, child = make_process(on_prepared=lambda: told.append("prepared"))
    client = Client()
    process.prepare([client.request])
    child.send({"op": "prepared", "lengths": [[client.request.serial, 12, 3], [99, 1, 1]]})
    await settle()
    assert (client.request.length, client.request.sequences, told) == (12, 3, ["prepared"])
    process.execute([client.request], ignore)
    assert child.received()[-1]["requests"] == [{"serial": client.request.serial}]


@fake_clock
async def test_request_prepared_by_another_worker_is_dropped_there() -> None:
    process, child = make_process()
    other, other_child = make_process()
    client = Client()
    other.prepare([client.request])
    process.execute([client.request], ignore)
    assert [header["op"] for header in other_child.received()] == ["prepare", "drop"]
    assert "inputs" in child.received()[0]["requests"][0]


@fake_clock
async def test_prepared_request_is_dropped_if_its_batch_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    process, child = make_process()
    prepared, large = Client(), Client({"x": WireTensor("x", "UINT8", (1 << 20,), bytes(1 << 20))})
    process.prepare([prepared.request])

    def without_descriptors() -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr("conch.workers.child.buffers.anonymous_file", without_descriptors)
    process.execute([prepared.request, large.request], ignore)
    await settle()
    assert prepared.errors == large.errors == ["the request could not be passed to its worker: Too many open files"]
    assert [header["op"] for header in child.received()] == ["prepare", "drop"]


@fake_clock
async def test_requests_fail_with_their_worker_if_the_server_cannot_handle_a_frame() -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    process, child = make_process(on_prepared=broken)
    (client,) = run(process)
    child.send({"op": "prepared", "lengths": []})
    await settle()
    assert child.kills == 1
    child.exit(-9)
    assert client.errors == [UNHEALTHY]


@fake_clock
async def test_request_that_cannot_be_encoded_fails_and_the_next_one_runs() -> None:
    done: list[Execution] = []
    process, child = make_process()
    client = Client()
    client.request.parameters = {"a": object()}  # type: ignore[dict-item]
    process.execute([client.request], done.append)
    await settle()
    assert len(done) == 1 and process.idle
    assert client.errors == [
        "the request could not be passed to its worker: Object of type object is not JSON serializable"
    ]
    (after,) = run(process)
    child.done(2, EMPTY)
    await settle()
    assert (after.finals, after.errors) == (1, [])


@fake_clock
async def test_step_of_a_worker_that_generates_answers_several_requests() -> None:
    progress: list[Any] = []
    process, child = make_process(on_progress=progress.append, slots=4)
    first, second = run(process)[0], run(process)[0]
    responses = [
        {**EMPTY, "serial": first.request.serial, "final": False},
        {**EMPTY, "serial": second.request.serial, "final": True},
    ]
    child.send({"op": "progress", "responses": responses, "load": {"running": 1}, "done": [[2, [1, 2, 3]]]})
    await settle()
    assert progress == [{"running": 1}]
    assert [(len(client.responses), client.finals) for client in (first, second)] == [(1, 0), (1, 1)]
    child.exit(1)
    assert [(client.finals, client.errors) for client in (first, second)] == [(1, [UNHEALTHY]), (1, [])]


@pytest.mark.parametrize("stopped", [True, False])
@fake_clock
async def test_worker_that_has_ended_is_freed_without_the_garbage_collector(stopped: bool) -> None:
    gc.disable()
    try:
        exits: list[int | None] = []
        process, child = make_process(on_exit=lambda ended: exits.append(ended.exit_status))
        process.calls.serve_bls(object(), "caller")  # type: ignore[arg-type]
        (client,) = run(process)
        if stopped:
            stopping = asyncio.create_task(process.stop())
            await settle()
            child.exit(0)
            await stopping
            del stopping
        else:
            child.exit(-9)
        await settle()
        assert client.errors == [UNHEALTHY]
        assert exits == ([] if stopped else [-9])
        gone = ref(process)
        del process, child.on_exit, child.print
        assert gone() is None
    finally:
        gc.enable()


@fake_clock
async def test_request_whose_time_is_over_is_answered_and_cancelled_and_its_place_stays_taken() -> None:
    process, child = make_process()
    ended: list[Execution] = []
    late, timely = Client(), Client()
    late.request.deadline = monotonic_ns() + 60 * 10**9
    process.execute([late.request, timely.request], ended.append)
    child.received()
    await asyncio.sleep(61)
    assert (late.errors, timely.finals) == (["Request timeout expired"], 0)
    assert child.received() == [{"op": "cancel", "serial": late.request.serial}]
    assert not ended and not process.idle
    child.done(1, EMPTY, EMPTY)
    await settle()
    assert (late.finals, timely.finals, timely.errors) == (1, 1, [])
    assert len(ended) == 1 and process.idle


@fake_clock
async def test_idle_worker_that_gets_no_time_to_end_is_not_said_to_have_hung() -> None:
    process, child = make_process()
    kills: list[Cause] = []
    process.on_kill = lambda worker, cause: kills.append(cause)
    await process.stop(0)
    assert child.exit_status is not None and not kills


@fake_clock
async def test_nothing_is_kept_of_requests_that_end_long_before_their_time() -> None:
    process, child = make_process()
    clients = [Client(), Client(), Client()]
    for client in clients:
        client.request.deadline = monotonic_ns() + 3600 * 10**9
    process.execute([clients[0].request], ignore)
    process.execute([clients[1].request], ignore)
    process.execute([clients[2].request], ignore)
    child.done(1, EMPTY)
    child.send({"op": "done", "batch": 2, "times": [0, 0, 0], "error": ["INTERNAL", "broken"]})
    await settle()
    child.exit(1)
    await settle()
    assert [client.finals for client in clients] == [1, 1, 1]
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FakeClockLoop)
    assert loop.pending_timers() == []


@fake_clock
async def test_request_that_ends_in_time_does_not_expire() -> None:
    process, child = make_process()
    client = Client()
    client.request.deadline = monotonic_ns() + 60 * 10**9
    process.execute([client.request], ignore)
    child.done(1, EMPTY)
    await settle()
    child.received()
    await asyncio.sleep(61)
    assert (client.finals, client.errors, child.received()) == (1, [], [])


@fake_clock
async def test_request_that_is_not_finished_is_continued_by_its_number_with_all_its_times() -> None:
    process, child = make_process()
    executions: list[Execution] = []
    (client,) = run(process, on_done=executions.append)
    [first] = child.received()
    child.send({**DONE, "batch": 1, "responses": [None], "unfinished": [0]})
    await settle()
    assert (executions[0].unfinished, client.finals, process.idle) == ([client.request], 0, False)
    started = client.request.times.started
    process.execute([client.request], executions.append)
    [again] = child.received()
    assert again["requests"] == [{"serial": first["requests"][0]["serial"]}]
    child.done(2, EMPTY)
    await settle()
    times = client.request.times
    assert (times.started, times.compute_input, times.compute_infer, times.compute_output) == (started, 2, 4, 6)
    assert (client.finals, client.errors, process.idle) == (1, [], True)


@fake_clock
async def test_request_that_ends_before_it_is_continued_is_dropped_by_the_worker() -> None:
    for ends_first in (True, False):
        process, child = make_process()
        (client,) = run(process)
        if ends_first:
            client.request.fail(ConchError("late", Code.UNAVAILABLE))
        child.received()
        child.send({**DONE, "batch": 1, "responses": [None], "unfinished": [0]})
        await settle()
        client.request.fail(ConchError("late", Code.UNAVAILABLE))
        assert [(header["op"], header.get("serial")) for header in child.received()] == [
            ("drop", client.request.serial)
        ]
        assert process.idle


@fake_clock
async def test_rescheduled_request_that_ends_before_it_runs_again_does_not_keep_its_worker() -> None:
    for ends_first in (True, False):
        process, child = make_process()
        (client,) = run(process)
        if ends_first:
            client.request.fail(ConchError("late", Code.UNAVAILABLE))
        child.received()
        child.send({**DONE, "batch": 1, "responses": [None], "rescheduled": [0]})
        await settle()
        assert process.idle is ends_first
        client.request.fail(ConchError("late", Code.UNAVAILABLE))
        assert (process.idle, child.received()) == (True, [])


@fake_clock
async def test_rescheduled_request_runs_again_with_its_inputs_and_ends_with_its_worker() -> None:
    process, child = make_process()
    (client,) = run(process)
    for batch in (1, 2):
        assert [header["requests"][0]["serial"] for header in child.received()] == [client.request.serial]
        child.send({**DONE, "batch": batch, "responses": [None], "rescheduled": [0]})
        await settle()
        process.execute([client.request], ignore)
    child.exit(-9)
    assert (client.errors, client.finals, process.idle) == ([UNHEALTHY], 1, True)


@fake_clock
async def test_request_that_is_not_finished_fails_with_its_worker() -> None:
    process, child = make_process()
    (client,) = run(process)
    child.send({**DONE, "batch": 1, "responses": [None], "unfinished": [0]})
    await settle()
    child.exit(-9)
    assert client.errors == [UNHEALTHY]


DONE: dict[str, Any] = {"op": "done", "times": [1, 2, 3]}
