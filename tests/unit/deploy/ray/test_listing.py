"""What the directory keeps of replicas that come, are silent and go, and what an ingress goes on knowing."""

from __future__ import annotations

import pytest

from conch.deploy.ray import listing
from conch.deploy.ray.listing import FORGET_SECONDS, SILENCE_SECONDS, KnownReplicas, Listing, by_model
from tests.unit.deploy.ray.records import news, replica, served


def test_a_replica_is_news_once() -> None:
    listed = Listing(100)
    assert listed.announce(replica(), 0)
    assert not listed.announce(replica(), 2)
    assert (listed.revision, listed.answer().replicas) == (101, (replica(),))


def test_a_replica_that_says_something_else_is_news() -> None:
    listed = Listing(100)
    listed.announce(replica(), 0)
    changed = replica("a", served())
    assert listed.announce(changed, 1)
    assert (listed.revision, listed.answer().replicas) == (102, (changed,))


def test_a_replica_that_was_withdrawn_does_not_come_back() -> None:
    listed = Listing(0)
    listed.announce(replica(), 0)
    listed.withdraw("a")
    assert listed.answer() == news(revision=2, withdrawn=("a",))
    assert not listed.announce(replica(), 1)  # one that was on its way
    assert listed.answer() == news(revision=2, withdrawn=("a",))


def test_a_replica_that_nobody_knew_is_withdrawn_all_the_same() -> None:
    listed = Listing(0)
    listed.withdraw("a")  # the directory has started again since it came
    assert listed.answer() == news(revision=1, withdrawn=("a",))


def test_the_replicas_that_were_withdrawn_first_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_REMEMBERED", 2)
    listed = Listing(0)
    for name in "abc":
        listed.withdraw(name)
    assert listed.answer().withdrawn == {"b", "c"}


def test_a_silent_replica_is_forgotten_and_comes_back_when_it_speaks() -> None:
    listed = Listing(0)
    listed.announce(replica("a"), 0)
    listed.announce(replica("b"), 5)
    assert not listed.expire(SILENCE_SECONDS)
    assert listed.expire(SILENCE_SECONDS + 1)
    assert listed.answer() == news(replica("b"), revision=3)
    assert not listed.expire(SILENCE_SECONDS + 1)
    assert listed.announce(replica("a"), 20)
    assert listed.revision == 4


def test_a_revision_is_never_that_of_the_listing_before() -> None:
    before, after = Listing(1_000_000), Listing(2_000_000)
    for listed in (before, after):
        listed.announce(replica(), 0)
    assert before.revision < after.revision


def test_an_ingress_knows_what_the_directory_says_in_the_order_of_names() -> None:
    known = KnownReplicas()
    known.learn(news(replica("b"), replica("a"), revision=7), 0)
    assert (known.revision, known.replicas) == (7, [replica("a"), replica("b")])


def test_an_ingress_keeps_what_a_directory_that_started_again_does_not_know_yet() -> None:
    known = KnownReplicas()
    known.learn(news(replica("a"), replica("b")), 0)
    known.learn(news(), 5)
    assert known.replicas == [replica("a"), replica("b")]
    known.learn(news(replica("a")), 6)
    known.learn(news(replica("a")), 5 + FORGET_SECONDS)
    assert known.replicas == [replica("a"), replica("b")]
    known.learn(news(replica("a")), 6 + FORGET_SECONDS)
    assert known.replicas == [replica("a")]


def test_an_ingress_keeps_what_it_knew_also_when_the_directory_was_away_for_long() -> None:
    known = KnownReplicas()
    known.learn(news(replica("a")), 0)
    known.learn(news(), 100 * FORGET_SECONDS)  # the first answer of one that has just started
    assert known.replicas == [replica("a")]
    known.learn(news(replica("a")), 100 * FORGET_SECONDS + 1)
    known.learn(news(), 200 * FORGET_SECONDS)
    assert known.replicas == [replica("a")]


def test_an_ingress_forgets_at_once_what_was_withdrawn() -> None:
    known = KnownReplicas()
    known.learn(news(replica("a"), replica("b")), 0)
    known.learn(news(replica("b"), withdrawn=("a", "never known")), 1)
    assert known.replicas == [replica("b")]


def test_models_are_found_on_all_replicas_that_have_them() -> None:
    first, second = replica("a", served("x"), served("y")), replica("b", served("y"))
    assert by_model([first, second]) == {
        "x": [(first, served("x"))],
        "y": [(first, served("y")), (second, served("y"))],
    }
