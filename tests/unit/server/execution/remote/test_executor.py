"""Requests on their way to servers that do what the test says."""

from __future__ import annotations

import asyncio

import pytest

from conch.client.transport import LostError, UnreachableError
from conch.core.errors import Code, ConchError, not_found, unavailable
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.execution.remote.executor import RemoteSequences
from tests.events import until
from tests.unit.server.execution.remote.fakes import A, B, RemoteBench
from tests.unit.server.fakes import UncopiedData

REFUSED = UnreachableError("no connection: Connection refused")


async def test_a_request_whose_inputs_would_be_copied_from_shared_memory_is_refused_when_too_much_is_held() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    request = InferRequest("m", {"x": WireTensor("x", "FP32", (1,), UncopiedData(4))}, lambda response: None)
    with pytest.raises(ConchError, match="too many bytes"):
        bench.executor.submit(request)
    assert bench.executor.endpoints.in_flight == {A: 0}


async def test_a_configuration_is_waited_for_while_the_server_loads_the_model() -> None:
    bench = RemoteBench(A, connect_timeout=0.001)
    await bench.executor.start()
    bench.servers[A].checks_to_load = 3
    bench.servers[A].loaded.clear()
    assert (await bench.executor.config()).max_batch_size == 4
    bench.servers[A].loaded.clear()
    bench.servers[A].checks_to_load = 100
    waiting = asyncio.ensure_future(bench.executor.config())
    await until(lambda: bench.servers[A].checks_to_load < 99)
    bench.servers[A].reason = REFUSED
    with pytest.raises(ConchError, match="Connection refused"):
        await waiting


async def test_a_request_is_answered_and_counted() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    (await bench.servers[A].next()).answer()
    await sent.ended.wait()
    assert [tensor.name for tensor in sent.responses[0].outputs] == ["y"]
    assert bench.statistics.execution_count == 1
    await until(lambda: bench.executor.endpoints.in_flight == {A: 0})


@pytest.mark.parametrize(
    ("decoupled", "shape", "warning"),
    [
        (False, (1, 1), ""),
        (False, (1, 2), "in the shape [1, 2], but its configuration declares it as [-1, 1]"),
        (True, (1, 2), "in the shape [1, 2], but its configuration declares it as [-1, 1]"),
        (False, (2, 1), "in the shape [2, 1] for a request with the batch size 1"),
        (True, (2, 1), ""),
    ],
)
async def test_an_output_of_another_shape_is_reported_once(
    decoupled: bool, shape: tuple[int, ...], warning: str
) -> None:
    bench = RemoteBench(A, decoupled=decoupled)
    await bench.executor.start()
    for _ in range(2):
        sent = bench.send(outputs=("y",))
        (await bench.servers[A].next()).answer(shape)
        await sent.ended.wait()
        assert sent.responses[0].outputs[0].shape == shape
    assert [warning in told for told in bench.warnings] == [True] * bool(warning)


async def test_outputs_of_a_request_that_names_none_are_chosen_by_the_server() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    call = await bench.servers[A].next()
    assert call.request.outputs == ()
    call.answer()
    await sent.ended.wait()
    assert [tensor.name for tensor in sent.responses[0].outputs] == ["y"]
    assert not bench.warnings


async def test_without_a_ready_server_a_request_is_refused_at_once_with_the_reason() -> None:
    bench = RemoteBench(A)
    bench.fails(A, unavailable("it has no model 'm'"))
    await bench.executor.start()
    assert (bench.executor.ready, bench.executor.unavailable_reason) == (False, f"{A}: it has no model 'm'")
    with pytest.raises(ConchError, match="model 'm' is not available: grpc://a:1: it has no model 'm'") as refused:
        bench.send()
    assert refused.value.code is Code.UNAVAILABLE


async def test_a_model_is_ready_again_when_its_server_is() -> None:
    bench = RemoteBench(A)
    bench.fails(A, REFUSED)
    await bench.executor.start()
    assert not bench.executor.ready
    bench.servers[A].reason = None
    bench.servers[A].on_broken()
    await until(lambda: bench.executor.ready)
    bench.send()
    await bench.servers[A].next()


async def test_the_start_waits_for_one_ready_server_and_not_for_all() -> None:
    bench = RemoteBench(A, B)
    bench.fails(A, REFUSED)
    await bench.executor.start()
    assert bench.executor.ready
    assert bench.executor.endpoints.urls == [A, B]


async def test_a_request_that_could_not_be_sent_goes_to_another_server() -> None:
    bench = RemoteBench(A, B)
    await bench.executor.start()
    bench.servers[A].refusal = bench.servers[A].reason = REFUSED
    sent = [bench.send() for _ in range(2)]
    for _ in sent:
        (await bench.servers[B].next()).answer()
    for one in sent:
        await one.ended.wait()
    assert bench.servers[A].tried == 1
    assert all(one.responses[0].error is None for one in sent)
    await until(lambda: bench.executor.endpoints.in_flight == {A: 0, B: 0})


async def test_the_only_server_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.server.execution.remote.executor.BACK_OFF", 0.0)
    bench = RemoteBench(A)
    await bench.executor.start()
    bench.servers[A].refusal = REFUSED
    error = await bench.send().error()
    assert error.message == f"model 'm' is not available: {A}: no connection: Connection refused"
    assert (error.code, bench.servers[A].tried) == (Code.UNAVAILABLE, 2)
    assert bench.statistics.execution_count == 0


@pytest.mark.parametrize("repeat_lost", [False, True])
async def test_a_lost_request_is_repeated_only_where_that_is_allowed(repeat_lost: bool) -> None:
    bench = RemoteBench(A, B, repeat_lost=repeat_lost)
    await bench.executor.start()
    sent = bench.send()
    await asyncio.wait(
        [asyncio.create_task(server.came.wait()) for server in bench.servers.values()], return_when="FIRST_COMPLETED"
    )
    first, second = sorted(bench.servers.values(), key=lambda server: -server.tried)
    (await first.next()).fail(LostError("the connection broke (reset)"))
    if not repeat_lost:
        error = await sent.error()
        assert error.message == f"{first.url}: the connection broke (reset); the request may have run there"
        assert second.tried == 0
        return
    (await second.next()).answer()
    await sent.ended.wait()
    assert sent.responses[0].error is None


@pytest.mark.parametrize(("decoupled", "correlation_id"), [(True, 0), (False, 7)])
async def test_what_may_have_changed_something_is_never_repeated(decoupled: bool, correlation_id: int) -> None:
    bench = RemoteBench(A, decoupled=decoupled, repeat_lost=True)
    await bench.executor.start()
    bench.executor.endpoints.update([A, B])
    sent = bench.send(correlation_id=correlation_id, flags=SEQUENCE_START if correlation_id else 0)
    call = await bench.servers[A].next()
    bench.executor.endpoints.mark(B, "")
    call.fail(LostError("the connection broke"))
    assert "may have run there" in (await sent.error()).message
    assert bench.servers[B].tried == 0


async def test_an_error_of_the_server_keeps_its_code_and_is_not_tried_again() -> None:
    bench = RemoteBench(A, B)
    await bench.executor.start()
    for server in bench.servers.values():
        server.refusal = not_found("no such row")
    error = await bench.send().error()
    assert (error.code, error.message) == (Code.NOT_FOUND, "no such row")
    assert sum(server.tried for server in bench.servers.values()) == 1


async def test_a_server_that_unloads_its_model_is_asked_at_once() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    bench.servers[A].refusal = not_found("Request for unknown model: 'm' is not found")
    bench.servers[A].reason = unavailable("it has no model 'm'")
    await bench.send().error()
    await until(lambda: bench.executor.unavailable_reason == f"{A}: it has no model 'm'")


async def test_a_cancelled_request_is_cancelled_on_the_remote_server() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    call = await bench.servers[A].next()
    sent.request.cancel()
    assert (await sent.error()).code is Code.CANCELLED
    await asyncio.wait([call.done])
    assert call.done.cancelled()


async def test_a_request_that_is_cancelled_before_it_was_sent_frees_its_place() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    sent.request.cancel()
    await until(lambda: not bench.executor.endpoints.in_flight[A])
    assert bench.servers[A].tried == 0
    assert (await sent.error()).code is Code.CANCELLED


async def test_the_shorter_of_two_time_limits_counts() -> None:
    bench = RemoteBench(A, timeout=50.0)
    await bench.executor.start()
    bench.send()
    bench.send(timeout=2_000_000)
    await bench.servers[A].next()
    await bench.servers[A].next()
    first, second = bench.servers[A].seconds
    assert first is not None and 40 < first <= 50
    assert second is not None and 1 < second <= 2


async def test_a_server_that_does_not_answer_in_time_is_named() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    (await bench.servers[A].next()).fail(TimeoutError())
    error = await sent.error()
    assert (error.code, error.message.startswith(f"no response from {A} within ")) == (Code.UNAVAILABLE, True)


async def test_too_many_requests_are_refused() -> None:
    bench = RemoteBench(A, limit=1)
    await bench.executor.start()
    bench.send()
    with pytest.raises(ConchError, match="Exceeds maximum queue size"):
        bench.send()


async def test_requests_of_a_sequence_are_sent_one_after_the_other() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    flags = (SEQUENCE_START, 0, SEQUENCE_END)
    sent = [bench.send(correlation_id="story", flags=flag) for flag in flags]
    for flag in flags:
        call = await bench.servers[A].next()
        assert (call.request.flags, bench.servers[A].calls) == (flag, [])
        call.answer()
    for one in sent:
        await one.ended.wait()
    await until(lambda: not bench.executor.sequences)


async def test_a_correlation_id_outside_of_a_sequence_keeps_nothing_back() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    for _ in range(2):
        bench.send(correlation_id=3)
    await until(lambda: len(bench.servers[A].calls) == 2)
    assert bench.executor.sequences == 0


async def test_a_lost_request_ends_its_sequence() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    first = bench.send(correlation_id=3, flags=SEQUENCE_START)
    (await bench.servers[A].next()).fail(LostError("the connection broke"))
    assert "may have run there" in (await first.error()).message
    bench.executor.endpoints.mark(A, "", gone=True)
    for _ in range(2):
        with pytest.raises(ConchError, match="has ended early, because grpc://a:1 has lost a request before this one"):
            bench.send(correlation_id=3)
    bench.send(correlation_id=3, flags=SEQUENCE_START)
    assert (await bench.servers[A].next()).request.flags == SEQUENCE_START


@pytest.mark.parametrize("sent", [False, True])
async def test_a_cancelled_request_without_a_response_ends_its_sequence(sent: bool) -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    first = bench.send(correlation_id=3, flags=SEQUENCE_START)
    call = await bench.servers[A].next()
    cancelled, behind = bench.send(correlation_id=3), bench.send(correlation_id=3, flags=SEQUENCE_END)
    if sent:
        call.answer()
        await first.ended.wait()
        await bench.servers[A].next()
    cancelled.request.cancel()
    if not sent:
        call.answer()
    assert "has ended early, because a request before this one was cancelled" in (await behind.error()).message
    assert bench.servers[A].calls == []


async def test_a_cancelled_request_with_a_response_does_not_end_its_sequence() -> None:
    bench = RemoteBench(A, decoupled=True)
    await bench.executor.start()
    first = bench.send(correlation_id=3, flags=SEQUENCE_START)
    (await bench.servers[A].next()).deliver(InferResponse(final=False))
    first.request.cancel()
    await first.ended.wait()
    bench.send(correlation_id=3)
    assert (await bench.servers[A].next()).request.flags == 0


async def test_a_sequence_that_starts_again_on_a_new_version_waits_for_the_last_request_on_the_old_one() -> None:
    sequences = RemoteSequences()
    old, new = (RemoteBench(A, key="m", sequences=sequences) for _ in range(2))
    for bench in (old, new):
        await bench.executor.start()
    last = old.send(correlation_id=3, flags=SEQUENCE_START)
    call = await old.servers[A].next()
    old.executor.retire()
    with pytest.raises(ConchError, match="has ended early, because the model was reloaded or unloaded"):
        new.send(correlation_id=3)
    again = new.send(correlation_id=3, flags=SEQUENCE_START)
    await asyncio.sleep(0)
    assert new.servers[A].tried == 0
    call.answer()
    await last.ended.wait()
    (await new.servers[A].next()).answer()
    await again.ended.wait()


async def test_a_request_of_a_sequence_does_not_wait_longer_than_it_may() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    bench.send(correlation_id=3, flags=SEQUENCE_START)
    await bench.servers[A].next()
    late = bench.send(correlation_id=3, timeout=1)
    behind = bench.send(correlation_id=3, flags=SEQUENCE_END)
    assert "no response from grpc://a:1 within" in (await late.error()).message
    assert "sequence 3 of model 'm' has ended early" in (await behind.error()).message
    assert bench.servers[A].tried == 1


@pytest.mark.parametrize("gone", [False, True])
async def test_a_sequence_whose_start_moves_to_another_server_moves_as_a_whole(gone: bool) -> None:
    bench = RemoteBench(A, B)
    await bench.executor.start()
    bench.executor.endpoints.mark(B, "")
    away, home = bench.servers[A], bench.servers[B]
    away.refusal = REFUSED
    flags = (SEQUENCE_START, 0, 0, SEQUENCE_END)
    sent = [bench.send(correlation_id=3, flags=flag) for flag in flags]
    if gone:
        bench.executor.endpoints.mark(A, "no connection", gone=True)
    for flag in flags:
        call = await home.next()
        assert call.request.flags == flag
        call.answer()
    for one in sent:
        await one.ended.wait()
    assert all(one.responses[-1].error is None for one in sent) and away.tried == 1
    await until(lambda: not any(bench.executor.endpoints.in_flight.values()))
    assert bench.executor.sequences == 0


@pytest.mark.parametrize("failure", [LostError("the connection broke"), UnreachableError("no connection")])
async def test_a_sequence_one_of_whose_requests_does_not_arrive_fails_as_a_whole(failure: ConchError) -> None:
    bench = RemoteBench(A, B, connect_timeout=0.0)
    await bench.executor.start()
    bench.executor.endpoints.mark(B, "")
    sent = [bench.send(correlation_id=3, flags=flag) for flag in (SEQUENCE_START, 0, 0, SEQUENCE_END)]
    (await bench.servers[A].next()).answer()
    (await bench.servers[A].next()).fail(failure)
    errors = [(await one.error()).message for one in sent[1:]]
    assert failure.message in errors[0]
    assert [error.partition(", because")[0] for error in errors[1:]] == ["sequence 3 of model 'm' has ended early"] * 2
    assert (bench.servers[A].tried, bench.servers[B].tried) == (2, 0)
    again = bench.send(correlation_id=3, flags=SEQUENCE_START)
    (await bench.servers[A].next()).answer()
    await again.ended.wait()


async def test_a_server_that_leaves_while_the_model_stops_is_closed_once() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    bench.send()
    await bench.servers[A].next()
    bench.executor.endpoints.update([])
    await bench.executor.stop(0)
    await until(lambda: not bench.executor.endpoints.in_flight)
    bench.executor.endpoints.update([B])
    assert B not in bench.servers


async def test_a_sequence_that_could_not_begin_on_one_server_begins_on_another_and_stays_there() -> None:
    bench = RemoteBench(A, B)
    await bench.executor.start()
    bench.executor.endpoints.mark(B, "")
    away, home = bench.servers[A], bench.servers[B]
    away.refusal = REFUSED
    first = bench.send(correlation_id=3, flags=SEQUENCE_START)
    (await home.next()).answer()
    await first.ended.wait()
    assert away.tried == 1
    away.refusal = None
    bench.send()
    await away.next()
    for _ in range(2):
        bench.send(correlation_id=3)
        (await home.next()).answer()
    assert (away.tried, bench.executor.sequences) == (2, 1)


async def test_responses_of_a_decoupled_model_are_passed_on_as_they_come() -> None:
    bench = RemoteBench(A, decoupled=True)
    await bench.executor.start()
    sent = bench.send()
    call = await bench.servers[A].next()
    call.deliver(InferResponse(final=False))
    assert len(sent.responses) == 1
    call.deliver(InferResponse())
    call.done.set_result(None)
    await sent.ended.wait()
    assert [response.final for response in sent.responses] == [False, True]
    assert bench.statistics.responses[1].empty_response.count == 1


async def test_what_begins_alike_goes_to_one_server() -> None:
    bench = RemoteBench(A, B, affinity="text_input", affinity_bytes=4)
    await bench.executor.start()
    bench.executor.endpoints.mark(A, "")
    bench.executor.endpoints.mark(B, "")
    for ending in (b"one", b"two", b"three"):
        bench.send(b"once" + ending)
    await asyncio.sleep(0)
    assert sorted(server.tried for server in bench.servers.values()) == [0, 3]


async def test_a_sticky_model_goes_to_one_server_whatever_it_is_asked() -> None:
    bench = RemoteBench(A, B, sticky=True)
    await bench.executor.start()
    bench.executor.endpoints.mark(A, "")
    bench.executor.endpoints.mark(B, "")
    for text in (b"one", b"two", b"three"):
        bench.send(text)
    await asyncio.sleep(0)
    assert sorted(server.tried for server in bench.servers.values()) == [0, 3]


async def test_a_removed_server_is_closed_after_its_last_request() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    call = await bench.servers[A].next()
    bench.executor.endpoints.update([])
    assert not bench.servers[A].closed
    call.answer()
    await sent.ended.wait()
    await until(lambda: bench.servers[A].closed)
    assert bench.executor.unavailable_reason == "it has no servers"


async def test_stopping_fails_what_is_in_progress_and_closes_all_connections() -> None:
    bench = RemoteBench(A)
    await bench.executor.start()
    sent = bench.send()
    await bench.servers[A].next()
    await bench.executor.stop(0)
    assert (await sent.error()).code is Code.UNAVAILABLE
    assert bench.servers[A].closed
    with pytest.raises(ConchError, match="is being unloaded"):
        bench.send()
