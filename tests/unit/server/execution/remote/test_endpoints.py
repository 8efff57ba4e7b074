"""Which server of a remote model gets a request: the clock and the servers' states are the test's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from conch.core.errors import Code, ConchError, invalid
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest
from conch.server.execution.remote.endpoints import Assignment, Endpoints, LostSequences

A, B, C = "grpc://a:1", "grpc://b:1", "http://c:1"
IDLE_SECONDS = 10.0


class Choice:
    """Endpoints with the time in the test's hand, and what they said of addresses; ``lost`` may be shared."""

    def __init__(self, *urls: str, key: str = "m", lost: LostSequences | None = None) -> None:
        self.now = 0.0
        self.added: list[str] = []
        self.gone: list[str] = []
        self.endpoints = Endpoints(
            lambda: self.now,
            idle_seconds=IDLE_SECONDS,
            key=key,
            lost=lost,
            check=_refuse_ftp,
            on_added=self.added.append,
            on_gone=self.gone.append,
        )
        self.endpoints.update(urls)
        for url in urls:
            self.endpoints.mark(url, "")

    def take(self, correlation_id: int | str = 0, flags: int = 0, key: bytes = b"") -> Assignment:
        return self.endpoints.take(request(correlation_id, flags), key)


def _refuse_ftp(urls: Sequence[str]) -> None:
    if any(url.startswith("ftp") for url in urls):
        raise invalid("no ftp")


def request(correlation_id: int | str = 0, flags: int = 0) -> InferRequest:
    return InferRequest("m", {}, lambda response: None, correlation_id=correlation_id, flags=flags)


def test_requests_go_to_the_server_with_the_fewest_in_progress() -> None:
    choice = Choice(A, B)
    first, second, third = choice.take(), choice.take(), choice.take()
    assert {first.url, second.url} == {A, B}
    assert choice.endpoints.in_flight == {third.url: 2, ({A, B} - {third.url}).pop(): 1}
    choice.endpoints.release(request(), first)
    choice.endpoints.release(request(), third)
    assert sum(choice.endpoints.in_flight.values()) == 1


def test_without_a_ready_server_the_error_says_why() -> None:
    choice = Choice(A)
    choice.endpoints.mark(A, "no connection: Connection refused")
    with pytest.raises(ConchError, match="model 'm' is not available: grpc://a:1: no connection") as refused:
        choice.take()
    assert refused.value.code is Code.UNAVAILABLE
    choice.endpoints.mark(A, "")
    assert choice.take().url == A


def test_without_any_server_the_error_says_so() -> None:
    choice = Choice(A)
    choice.endpoints.update([])
    assert choice.gone == [A]
    assert choice.endpoints.reason == "it has no servers"
    with pytest.raises(ConchError, match="it has no servers"):
        choice.take()


def test_a_new_server_gets_requests_once_it_is_ready() -> None:
    choice = Choice(A)
    choice.endpoints.update([A, B])
    assert choice.added == [A, B]
    assert {choice.take().url for _ in range(3)} == {A}
    choice.endpoints.mark(B, "")
    assert choice.take().url == B


def test_the_same_servers_again_change_nothing() -> None:
    choice = Choice(A, B)
    choice.endpoints.update([B, A])
    assert (choice.added, choice.gone) == ([A, B], [])


def test_a_refused_address_changes_nothing() -> None:
    choice = Choice(A)
    with pytest.raises(ConchError, match="no ftp"):
        choice.endpoints.update([B, "ftp://x"])
    assert choice.endpoints.urls == [A]


def test_a_removed_server_finishes_its_requests_and_gets_no_new_ones() -> None:
    choice = Choice(A)
    running = choice.take()
    choice.endpoints.update([B])
    choice.endpoints.mark(B, "")
    assert choice.take().url == B
    assert (choice.endpoints.in_flight[A], choice.gone) == (1, [])
    choice.endpoints.release(request(), running)
    assert (choice.gone, choice.endpoints.in_flight) == ([A], {B: 1})


def test_a_server_that_comes_back_before_it_left_is_used_again() -> None:
    choice = Choice(A)
    choice.take()
    choice.endpoints.update([])
    choice.endpoints.update([A])
    assert choice.added == [A]
    assert choice.take().url == A


@pytest.mark.parametrize("correlation_id", [7, "seven"])
def test_a_sequence_stays_where_it_started_until_it_ends(correlation_id: int | str) -> None:
    choice = Choice(A, B)
    home = choice.take(correlation_id, SEQUENCE_START)
    choice.endpoints.release(request(correlation_id, SEQUENCE_START), home)
    busy = [choice.take(correlation_id) for _ in range(5)]
    assert {one.url for one in busy} == {home.url}
    choice.endpoints.update([url for url in (A, B) if url != home.url])
    for one in busy:
        choice.endpoints.release(request(correlation_id), one)
    assert (choice.endpoints.sequences, choice.gone) == (1, [])
    last = choice.take(correlation_id, SEQUENCE_END)
    assert last.url == home.url
    choice.endpoints.release(request(correlation_id, SEQUENCE_END), last)
    assert (choice.endpoints.sequences, choice.gone) == (0, [home.url])


def test_a_lost_server_ends_its_sequences_until_they_start_again() -> None:
    choice = Choice(A)
    for correlation_id in (1, 2):
        choice.endpoints.release(request(correlation_id, SEQUENCE_START), choice.take(correlation_id, SEQUENCE_START))
    choice.endpoints.mark(A, "the connection broke", gone=True)
    assert choice.endpoints.sequences == 0
    choice.endpoints.mark(A, "")
    for _ in range(2):
        with pytest.raises(
            ConchError, match="sequence 1 of model 'm' has ended early, because its server grpc://a:1 became"
        ):
            choice.take(1)
    assert choice.take(2, SEQUENCE_START).url == A
    assert choice.take(2).url == A


@pytest.mark.parametrize("ended_by", ["start", "end", "time"])
def test_a_sequence_that_has_ended_early_is_remembered_as_long_as_it_may_be_continued(ended_by: str) -> None:
    choice = Choice(A)
    choice.endpoints.release(request(1, SEQUENCE_START), choice.take(1, SEQUENCE_START))
    choice.endpoints.mark(A, "the connection broke", gone=True)
    choice.endpoints.mark(A, "")
    if ended_by == "start":
        choice.take(1, SEQUENCE_START)
    elif ended_by == "end":
        with pytest.raises(ConchError, match="has ended early"):
            choice.take(1, SEQUENCE_END)
    else:
        choice.now = IDLE_SECONDS + 1
    assert choice.take(1).url == A


def test_a_sequence_of_a_retired_version_is_refused_by_the_next_one_until_it_starts_again() -> None:
    lost = LostSequences()
    old, new, other = (Choice(A, key=key, lost=lost) for key in ("m", "m", "other"))
    old.take(1, SEQUENCE_START)
    old.endpoints.retire("the model was reloaded")
    old.take(2, SEQUENCE_START)  # decoded before the reload
    for correlation_id in (1, 2):
        with pytest.raises(ConchError, match="has ended early, because the model was reloaded"):
            new.take(correlation_id)
    assert old.take(1, SEQUENCE_END).url == other.take(1).url == new.take(1, SEQUENCE_START).url == A
    assert new.take(1).url == A


def test_a_sequence_whose_end_came_before_its_version_was_retired_is_forgotten() -> None:
    lost = LostSequences()
    old, new = Choice(A, lost=lost), Choice(A, lost=lost)
    old.endpoints.release(request(1, SEQUENCE_START), old.take(1, SEQUENCE_START))
    last = old.take(1, SEQUENCE_END)
    old.endpoints.retire("the model was reloaded")
    old.endpoints.release(request(1, SEQUENCE_END), last)
    assert new.take(1).url == A


def test_a_sequence_that_is_not_heard_of_is_forgotten_unless_it_runs() -> None:
    choice = Choice(A)
    silent = choice.take("silent", SEQUENCE_START)
    choice.endpoints.release(request("silent", SEQUENCE_START), silent)
    choice.take("running", SEQUENCE_START)
    choice.now = IDLE_SECONDS + 1
    assert choice.endpoints.sequences == 1
    assert choice.endpoints.continues(request("running"))
    assert not choice.endpoints.continues(request("silent"))


def test_what_begins_alike_goes_to_one_server_unless_that_has_clearly_more_to_do() -> None:
    choice = Choice(A, B, C)
    home = choice.take(key=b"once upon a time")
    taken = [choice.take(key=b"once upon a time").url for _ in range(30)]
    assert taken[:3] == [home.url] * 3
    counts = choice.endpoints.in_flight
    assert set(counts) == {A, B, C}
    assert min(counts.values()) > 0
    assert counts[home.url] <= 1.5 * (31 + 1) / 3 + 1


def test_a_sequence_that_began_elsewhere_goes_where_its_key_leads_however_much_that_has_to_do() -> None:
    choice = Choice(A, B, C)
    chosen = {choice.take(7, key=b"sequence 7").url for _ in range(30)}
    assert chosen == {Choice(C, A, B).take(7, SEQUENCE_START, key=b"sequence 7").url}


def test_most_keys_stay_where_they_were_when_a_server_is_added() -> None:
    def homes(*urls: str) -> dict[bytes, str]:
        choice = Choice(*urls)
        found = {}
        for number in range(60):
            key = b"%d" % number
            endpoint = choice.take(key=key)
            choice.endpoints.release(request(), endpoint)
            found[key] = endpoint.url
        return found

    before, after = homes(A, B), homes(A, B, C)
    moved = {key for key in before if before[key] != after[key]}
    assert {after[key] for key in moved} == {C}
    assert set(after.values()) == {A, B, C}


def test_a_server_that_was_tried_is_left_out() -> None:
    choice = Choice(A, B)
    taken = choice.take()
    tried = taken.url
    choice.endpoints.move(request(), taken, b"", {tried})
    assert {tried, taken.url} == {A, B}
    assert choice.endpoints.in_flight == {tried: 0, taken.url: 1}
    with pytest.raises(ConchError, match="all servers were tried"):
        choice.endpoints.move(request(), taken, b"", {A, B})


def test_requests_behind_the_first_of_a_sequence_follow_it_to_another_server() -> None:
    choice = Choice(A, B)
    start, step = request(7, SEQUENCE_START), request(7)
    first, second = choice.endpoints.take(start), choice.endpoints.take(step)
    choice.endpoints.move(start, first, b"", {first.url})
    choice.endpoints.release(start, first)
    choice.endpoints.follow(step, second)
    assert second.url == first.url == choice.take(7, SEQUENCE_END).url
    assert choice.endpoints.in_flight == {A: 0, B: 0} | {first.url: 2}


def test_server_that_goes_before_a_sequence_has_started_there_does_not_end_it() -> None:
    choice = Choice(A, B)
    start, step = request(7, SEQUENCE_START), request(7)
    first, second = choice.endpoints.take(start), choice.endpoints.take(step)
    choice.endpoints.mark(first.url, "no connection", gone=True)
    choice.endpoints.move(start, first, b"", {first.url})
    choice.endpoints.follow(step, second)
    assert second.url == first.url and choice.endpoints.sequences == 1


def test_requests_behind_one_that_may_not_have_run_fail_and_the_next_sequence_does_not() -> None:
    choice = Choice(A)
    start, step, end = request(7, SEQUENCE_START), request(7), request(7, SEQUENCE_END)
    choice.endpoints.release(start, choice.endpoints.take(start))
    failing, behind = choice.endpoints.take(step), choice.endpoints.take(end)
    choice.endpoints.fail(step, failing, "a request before this one did not run")
    choice.endpoints.release(step, failing)
    with pytest.raises(ConchError, match="sequence 7 of model 'm' has ended early, because a request before this one"):
        choice.endpoints.follow(end, behind)
    again, later = choice.endpoints.take(start), choice.endpoints.take(step)
    choice.endpoints.release(end, behind)
    choice.endpoints.follow(step, later)
    assert choice.endpoints.sequences == 1 and choice.endpoints.in_flight == {A: 2} and again.url == A


def test_end_of_a_sequence_does_not_end_one_of_the_same_id_that_has_begun_in_between() -> None:
    choice = Choice(A, B)
    end = request(7, SEQUENCE_END)
    choice.take(7, SEQUENCE_START)
    ending = choice.endpoints.take(end)
    home = choice.take(7, SEQUENCE_START)
    choice.endpoints.release(end, ending)
    assert {choice.take(7).url for _ in range(5)} == {home.url}
