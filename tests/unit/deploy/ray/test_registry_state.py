"""The registry's state for replicas that appear, fall silent and leave, and the state that ingresses keep."""

from __future__ import annotations

import pytest

from conch.deploy.ray import registry
from conch.deploy.ray.registry import FORGET_SECONDS, SILENCE_SECONDS, KnownReplicas, RegistryState, by_model
from tests.unit.deploy.ray.records import replica, served, snapshot


def test_a_replica_that_registers_again_changes_nothing() -> None:
    state = RegistryState(100)
    assert state.register(replica(), 0)
    assert not state.register(replica(), 2)
    assert (state.revision, state.snapshot().replicas) == (101, (replica(),))


def test_a_replica_that_registers_with_other_models_is_a_change() -> None:
    state = RegistryState(100)
    state.register(replica(), 0)
    changed = replica("a", served())
    assert state.register(changed, 1)
    assert (state.revision, state.snapshot().replicas) == (102, (changed,))


def test_a_replica_that_was_deregistered_does_not_come_back() -> None:
    state = RegistryState(0)
    state.register(replica(), 0)
    state.deregister("a")
    assert state.snapshot() == snapshot(revision=2, deregistered=("a",))
    assert not state.register(replica(), 1)  # one that was on its way
    assert state.snapshot() == snapshot(revision=2, deregistered=("a",))


def test_a_replica_that_was_unknown_is_deregistered_all_the_same() -> None:
    state = RegistryState(0)
    state.deregister("a")  # the registry has started again since it came
    assert state.snapshot() == snapshot(revision=1, deregistered=("a",))


def test_the_replicas_that_were_deregistered_first_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_DEREGISTERED", 2)
    state = RegistryState(0)
    for name in "abc":
        state.deregister(name)
    assert state.snapshot().deregistered == {"b", "c"}


def test_a_silent_replica_is_forgotten_and_comes_back_when_it_speaks() -> None:
    state = RegistryState(0)
    state.register(replica("a"), 0)
    state.register(replica("b"), 5)
    assert not state.expire(SILENCE_SECONDS)
    assert state.expire(SILENCE_SECONDS + 1)
    assert state.snapshot() == snapshot(replica("b"), revision=3)
    assert not state.expire(SILENCE_SECONDS + 1)
    assert state.register(replica("a"), 20)
    assert state.revision == 4


def test_a_revision_is_never_that_of_an_earlier_registry() -> None:
    before, after = RegistryState(1_000_000), RegistryState(2_000_000)
    for state in (before, after):
        state.register(replica(), 0)
    assert before.revision < after.revision


def test_an_ingress_knows_what_the_registry_says_in_the_order_of_names() -> None:
    known = KnownReplicas()
    known.learn(snapshot(replica("b"), replica("a"), revision=7), 0)
    assert (known.revision, known.replicas) == (7, [replica("a"), replica("b")])


def test_an_ingress_keeps_what_a_registry_that_started_again_does_not_know_yet() -> None:
    known = KnownReplicas()
    known.learn(snapshot(replica("a"), replica("b")), 0)
    known.learn(snapshot(), 5)
    assert known.replicas == [replica("a"), replica("b")]
    known.learn(snapshot(replica("a")), 6)
    known.learn(snapshot(replica("a")), 5 + FORGET_SECONDS)
    assert known.replicas == [replica("a"), replica("b")]
    known.learn(snapshot(replica("a")), 6 + FORGET_SECONDS)
    assert known.replicas == [replica("a")]


def test_an_ingress_keeps_what_it_knew_also_when_the_registry_was_away_for_long() -> None:
    known = KnownReplicas()
    known.learn(snapshot(replica("a")), 0)
    known.learn(snapshot(), 100 * FORGET_SECONDS)  # the first answer of one that has just started
    assert known.replicas == [replica("a")]
    known.learn(snapshot(replica("a")), 100 * FORGET_SECONDS + 1)
    known.learn(snapshot(), 200 * FORGET_SECONDS)
    assert known.replicas == [replica("a")]


def test_an_ingress_forgets_at_once_what_was_deregistered() -> None:
    known = KnownReplicas()
    known.learn(snapshot(replica("a"), replica("b")), 0)
    known.learn(snapshot(replica("b"), deregistered=("a", "never known")), 1)
    assert known.replicas == [replica("b")]


def test_models_are_found_on_all_replicas_that_have_them() -> None:
    first, second = replica("a", served("x"), served("y")), replica("b", served("y"))
    assert by_model([first, second]) == {
        "x": [(first, served("x"))],
        "y": [(first, served("y")), (second, served("y"))],
    }
