"""Which requests of which sequences run, one event at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conch.core.errors import ConchError
from tests.unit.server.schedulers.sequences.bench import OLDEST, POLICY, SECOND, US, Bench

NO_START = (
    "Invalid argument: inference request for sequence 1 to model 'm' must specify the START flag on the first request "
    "of the sequence"
)
STRATEGIES = pytest.mark.parametrize("policy", [POLICY, OLDEST], ids=["direct", "oldest"])


def refusal(bench: Bench, *args: object, **fields: object) -> str:
    with pytest.raises(ConchError) as refused:
        bench.add("refused", *args, **fields)  # type: ignore[arg-type]
    return refused.value.status


@STRATEGIES
def test_requests_of_a_sequence_run_one_after_another(policy: object) -> None:
    bench = Bench(policy)
    bench.add("a", 1, "s")
    bench.add("b", 1)
    bench.add("c", 1, "e")
    assert bench.turn() == ["a"]
    assert bench.batch() == ["b"]
    assert bench.batch() == []
    bench.finish()
    assert bench.turn() == ["c"]
    assert bench.scheduler.live == 0 and len(bench.scheduler) == 0


def test_row_without_a_request_is_filled_so_that_the_others_keep_theirs() -> None:
    bench = Bench()
    bench.add("a", 1, "s")
    bench.add("b", 2, "s")
    assert bench.turn() == ["a", "b"]
    bench.add("c", 2)
    assert bench.turn() == ["-", "c"]
    bench.add("d", 1)
    assert bench.turn() == ["d"]


def test_rows_of_other_shapes_get_a_batch_of_their_own() -> None:
    bench = Bench(replace(POLICY, max_batch_size=3, slots=3), dims=(-1,))
    for id, width in (("a", 1), ("b", 2), ("c", 1)):
        bench.add(id, id, "s", shape=(1, width))
    assert bench.turn() == ["a", "-", "c"]
    assert bench.turn() == ["-", "b"]


def test_batch_waits_for_more_rows_but_not_for_ever() -> None:
    bench = Bench(replace(POLICY, minimum_utilization=0.75, max_delay=300 * US))
    bench.add("a", 1, "s")
    assert bench.batch() == [] and bench.wake_at == 300 * US
    bench.wait(300 * US)
    assert bench.turn() == ["a"]
    bench.add("b", 1)
    bench.add("c", 2, "s")
    assert bench.turn() == ["b", "c"]


def test_oldest_batches_the_heads_of_all_sequences() -> None:
    bench = Bench(OLDEST)
    for id, sequence in (("a", 1), ("b", 2)):
        bench.add(id, sequence, "s")
    bench.add("c", 2)
    bench.add("d", 1)
    assert bench.turn() == ["a", "b"]
    assert sorted(bench.turn()) == ["c", "d"]


def test_oldest_waits_for_a_preferred_size() -> None:
    bench = Bench(replace(OLDEST, preferred=(2,), max_delay=300 * US))
    bench.add("a", 1, "s")
    assert bench.batch() == [] and bench.wake_at == 300 * US
    bench.add("b", 2, "s")
    assert bench.turn() == ["a", "b"]


def test_oldest_answers_in_order_where_that_is_asked_for() -> None:
    bench = Bench(replace(OLDEST, preserve_ordering=True, slots=3, max_batch_size=1), instances=1)
    bench.add("a", 1, "s")
    bench.add("b", 2, "s")
    first = bench.add("c", 3, "s")
    assert bench.batch() == ["a"]
    first.cancel()
    assert bench.answers.keys() == set()
    bench.finish()
    assert bench.turn() == ["b"]
    assert list(bench.answers) == ["a", "b", "c"]


@STRATEGIES
def test_sequence_without_a_slot_waits_until_another_ends(policy: object) -> None:
    bench = Bench(policy)
    for id, sequence in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(id, sequence, "s")
    bench.add("d", 3, "e")
    assert bench.turn() == ["a", "b"]
    assert bench.turn() == []
    bench.add("e", 1, "e")
    assert bench.turn() == ["e"]
    assert bench.turn() == ["c"]
    assert bench.turn() == ["d"]


def test_instance_with_the_lowest_free_row_gets_the_next_sequence() -> None:
    bench = Bench(instances=2)
    for id in "abc":
        bench.add(id, id, "s")
    assert bench.run() == {"i0": ["a", "c"], "i1": ["b"]}


def test_sequence_stays_with_its_instance() -> None:
    bench = Bench(instances=2)
    bench.add("a", 1, "s")
    bench.add("b", 2, "s")
    bench.turn()
    bench.add("c", 2)
    assert bench.run() == {"i1": ["c"]}


@pytest.mark.parametrize("sequence", [0, ""])
def test_request_without_an_id_is_refused(sequence: int | str) -> None:
    expected = "Invalid argument: inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    assert refusal(Bench(), sequence, "s") == expected


def test_request_of_an_unknown_sequence_is_refused() -> None:
    assert refusal(Bench(), 1) == NO_START


def test_request_with_several_rows_is_refused() -> None:
    bench = Bench()
    request = bench.request("a", 1, 1)
    request.batch_size = 2
    with pytest.raises(ConchError, match="must specify batch-size 1 due to requirements of sequence batcher"):
        bench.scheduler.add(request, 0)


def test_starting_again_continues_in_the_same_row(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.add("a", 1, "s")
    bench.add("b", 1, "s")
    assert "has a conflict" in caplog.text
    assert bench.turn() == ["a"]
    assert bench.turn() == ["b"]
    bench.add("c", 2, "s")
    assert bench.turn() == ["-", "c"]


def test_idle_sequence_leaves_its_row() -> None:
    bench = Bench()
    for id in "abc":
        bench.add(id, id, "s")
    assert bench.turn() == ["a", "b"]
    assert bench.batch() == [] and bench.wake_at == SECOND
    bench.wait(SECOND)
    assert bench.turn() == ["c"]
    assert bench.scheduler.live == 1


def test_idle_sequence_of_a_replaced_version_leaves_its_row_to_one_that_waits() -> None:
    bench = Bench(replace(POLICY, slots=1, max_batch_size=1, max_idle=60 * SECOND))
    bench.add("a1", 1, "s")
    bench.turn()
    bench.scheduler.note_replaced()
    bench.wait(2 * SECOND)
    bench.add("a2", 1)
    bench.add("b1", 2, "s")
    assert bench.turn() == ["a2"]
    assert bench.batch() == [] and bench.wake_at == bench.now + SECOND
    bench.wait(SECOND)
    assert bench.turn() == ["b1"]


def test_sequence_whose_request_runs_is_not_idle() -> None:
    bench = Bench()
    bench.add("a", 1, "s")
    assert bench.batch() == ["a"]
    bench.wait(5 * SECOND)
    assert bench.run() == {}
    bench.finish()
    bench.add("b", 1)
    assert bench.turn() == ["b"]


def test_idle_sequence_has_to_start_again() -> None:
    bench = Bench()
    bench.add("a", 1, "s")
    bench.turn()
    bench.wait(SECOND)
    assert refusal(bench, 1) == NO_START


def test_time_in_the_backlog_may_be_limited() -> None:
    bench = Bench()
    for id in "ab":
        bench.add(id, id, "s")
    bench.add("c", 1, "s", timeout=500)
    bench.add("d", 1, timeout=300)
    assert bench.turn() == ["a", "b"]
    assert bench.batch() == [] and bench.wake_at == 300 * US
    bench.wait(300 * US)
    bench.run()
    expired = "Unavailable: timeout of the corresponding sequence has been expired"
    assert [bench.error("c"), bench.error("d")] == [expired] * 2
    assert refusal(bench, 1) == NO_START


@STRATEGIES
def test_cancellation_takes_along_what_follows_in_the_sequence(policy: object) -> None:
    bench = Bench(policy)
    for id, marks in (("a", "s"), ("b", ""), ("c", ""), ("d", "")):
        request = bench.add(id, 1, marks)
        if id == "c":
            cancelled = request
    assert bench.batch() == ["a"]
    cancelled.cancel()
    assert sorted(bench.answers) == ["c", "d"]
    assert refusal(bench, 1) == NO_START
    bench.finish()
    assert bench.turn() == ["b"]
    assert bench.scheduler.live == 0


@STRATEGIES
def test_cancelled_sequence_makes_room_for_one_that_waits(policy: object) -> None:
    bench = Bench(policy)
    told = []
    bench.scheduler.on_cancelled = lambda: told.append(True)
    first = bench.add("a", 1, "s")
    for id in "bc":
        bench.add(id, id, "s")
    first.cancel()
    assert told
    assert sorted(bench.turn()) == ["b", "c"]


def test_cancellation_in_the_backlog_ends_the_whole_sequence() -> None:
    bench = Bench()
    for id in "ab":
        bench.add(id, id, "s")
    bench.add("c", 3, "s")
    bench.add("d", 3).cancel()
    assert sorted(bench.answers) == ["c", "d"]
    assert bench.scheduler.live == 2


@STRATEGIES
def test_sequences_of_an_instance_that_dies_fail_and_the_others_continue(policy: object) -> None:
    bench = Bench(policy, instances=2)
    for id, sequence in (("a", 1), ("b", 2)):
        bench.add(id, sequence, "s")
    bench.run()
    bench.add("c", 1)
    bench.add("d", 2)
    bench.die("i0")
    lost = "Internal: sequence 1 of model 'm' has ended: Stub process 'i0' is not healthy."
    assert bench.error("c") == lost
    assert refusal(bench, 1) == NO_START
    bench.finish("i1")
    assert bench.turn() == ["d"]


def test_client_of_a_sequence_that_was_idle_when_its_instance_died_is_reported_once() -> None:
    bench = Bench()
    bench.add("a", 1, "s")
    bench.turn()
    bench.die()
    assert refusal(bench, 1) == "Internal: sequence 1 of model 'm' has ended: Stub process 'i0' is not healthy."
    assert refusal(bench, 1) == NO_START


def test_backlog_waits_for_an_instance_that_starts_again() -> None:
    bench = Bench()
    for id in "abc":
        bench.add(id, id, "s")
    bench.run()
    bench.die()
    assert set(bench.answers) == {"a", "b"}
    assert bench.run() == {}
    bench.scheduler.add_instance("i0", bench.now)
    assert bench.turn() == ["c"]


def test_instance_that_is_to_go_finishes_its_sequences_and_gets_no_new_one() -> None:
    bench = Bench(instances=2)
    bench.add("a", 1, "s")
    bench.turn()
    assert not bench.scheduler.retire("i0")
    for id in "bcd":
        bench.add(id, id, "s")
    bench.add("e", 1, "e")
    assert bench.run() == {"i0": ["e"], "i1": ["b", "c"]}
    bench.finish("i0")
    assert bench.scheduler.retire("i0")
    assert len(bench.scheduler) == 1


def test_too_many_requests_are_refused() -> None:
    bench = Bench(replace(POLICY, limit=2))
    bench.add("a", 1, "s")
    bench.add("b", 1)
    assert refusal(bench, 1) == "Unavailable: [request id: refused] Exceeds maximum queue size"


def test_nothing_runs_until_as_many_requests_have_come_as_are_held() -> None:
    bench = Bench(replace(POLICY, hold=2, hold_backlog=1))
    bench.add("a", 1, "s")
    bench.add("b", 2, "s")
    assert bench.batch() == []
    bench.add("c", 3, "s")
    assert bench.turn() == ["a", "b"]


@STRATEGIES
def test_drained_requests_are_those_that_wait(policy: object) -> None:
    bench = Bench(policy)
    for id in "abc":
        bench.add(id, id, "s")
    bench.add("d", "a")
    bench.batch()
    assert sorted(request.id for request in bench.scheduler.drain()) == ["c", "d"]
    assert (len(bench.scheduler), bench.scheduler.live) == (0, 0)
    assert refusal(bench, 1) == NO_START


class TestIterative:
    POLICY = replace(OLDEST, iterative=True)

    def test_request_gets_a_sequence_of_its_own(self) -> None:
        bench = Bench(self.POLICY)
        first, second = bench.add("a", 0), bench.add("b", 0)
        assert (first.flags, first.correlation_id, second.correlation_id) == (1, 1, 2)
        assert bench.turn() == ["a", "b"]
        assert bench.scheduler.live == 0

    def test_request_runs_again_until_it_comes_no_more(self) -> None:
        bench = Bench(self.POLICY)
        request = bench.add("a", 0)
        bench.batch()
        bench.finish(again=[request])
        assert request.flags == 0
        assert bench.turn() == ["a"]
        assert list(bench.answers) == ["a"] and bench.scheduler.live == 0

    @pytest.mark.parametrize("runs", [True, False])
    def test_cancelled_request_does_not_run_again(self, runs: bool) -> None:
        bench = Bench(self.POLICY)
        request = bench.add("a", 0)
        bench.batch()
        if runs:
            request.cancel()
        bench.finish(again=[request])
        request.cancel()
        assert bench.batch() == [] and bench.answers["a"].error is not None
        assert (len(bench.scheduler), bench.scheduler.live) == (0, 0)
