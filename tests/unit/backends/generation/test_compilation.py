"""Structures that wait, take too much or come at a bad moment: a busy machine is no fault of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from conch.backends.generation.compilation import MOST_WAITING, Compilations
from conch.core.errors import Code, ConchError
from conch.core.sampling.structures import Structure
from conch.machine.facts import usable_cores
from tests.unit.backends.generation.fake_engine import FakeEngine

LIMIT = 5.0 * usable_cores()


class Harness:
    """Compilations whose times the test sets: ``now`` by the clock and the ``used`` processor time, in seconds."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.engine = FakeEngine()
        self.compilations = Compilations(
            self.engine, 5.0, wait_seconds=60.0, clock=lambda: self.now, processor_time=lambda: self.used
        )
        self._ended: Queue[tuple[str, Any, ConchError | None]] = Queue()

    def add(self, text: str, name: str = "") -> None:
        self.compilations.add(
            Structure("regex", text), lambda compiled, error: self._ended.put((name or text, compiled, error))
        )

    def next(self) -> tuple[str, Any, Code | None]:
        """Which request goes on next, with what, or why it does not."""
        name, compiled, error = self._ended.get(timeout=60)
        return name, compiled, None if error is None else error.code

    def error(self) -> str:
        return str(self._ended.get(timeout=60)[2])


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.engine.go_on.set()


def begun(harness: Harness, text: str) -> None:
    """Add a structure that compiles until the test lets it end, and wait until it has begun."""
    harness.add(text)
    while text not in harness.engine.compiling:
        pass


def test_slow_compilation_on_a_busy_machine_is_not_refused(harness: Harness) -> None:
    begun(harness, "slow")
    harness.now, harness.used = 59.0, LIMIT - 1
    harness.compilations.look()
    harness.engine.go_on.set()

    assert harness.next() == ("slow", "SLOW", None)


def test_too_much_processor_time_is_refused_and_not_spent_again(harness: Harness) -> None:
    begun(harness, "slow")
    harness.used = LIMIT + 1
    harness.compilations.look()

    assert harness.error() == (
        f"the regex that output must fit does not compile within {LIMIT:g} s of processor time "
        "(parameter 'structured_output_timeout')"
    )
    harness.add("slow")
    assert harness.next() == ("slow", None, Code.INVALID_ARG)
    harness.engine.go_on.set()
    harness.add("quick")
    assert harness.next() == ("quick", "QUICK", None)
    harness.add("slow")
    assert harness.next() == ("slow", None, Code.INVALID_ARG)
    assert harness.engine.compiling == ["slow", "quick"]


def test_those_that_wait_too_long_are_to_try_again(harness: Harness) -> None:
    begun(harness, "slow")
    harness.add("behind")
    harness.now = 61.0
    harness.compilations.look()

    assert {harness.next(), harness.next()} == {
        ("slow", None, Code.UNAVAILABLE), ("behind", None, Code.UNAVAILABLE)
    }  # fmt: skip
    harness.engine.go_on.set()
    harness.add("behind", "again")
    assert harness.next() == ("again", "BEHIND", None)


def test_no_more_than_so_many_structures_wait(harness: Harness) -> None:
    begun(harness, "slow")
    for number in range(MOST_WAITING - 1):
        harness.add(f"{number}")
    harness.add("too many")

    assert harness.error() == f"{MOST_WAITING} structures of other requests wait to be compiled"
    harness.add("0", "the same as another")
    harness.engine.go_on.set()
    ended = [harness.next() for _ in range(MOST_WAITING + 1)]
    assert ("the same as another", "0", None) in ended
    assert {code for _, _, code in ended} == {None}


def test_one_structure_of_many_requests_is_compiled_once(harness: Harness) -> None:
    begun(harness, "slow")
    for number in range(5):
        harness.add("slow", f"request {number}")
    harness.engine.go_on.set()

    assert {harness.next() for _ in range(6)} == {
        ("slow", "SLOW", None), *((f"request {number}", "SLOW", None) for number in range(5))
    }  # fmt: skip
    assert harness.engine.compiling == ["slow"]


def test_structure_that_was_compiled_lately_is_not_compiled_again(harness: Harness) -> None:
    for name in ("first", "again"):
        harness.add("quick", name)
        assert harness.next() == (name, "QUICK", None)
    for number in range(63):
        harness.add(f"{number}")
        harness.next()
    harness.add("quick")
    harness.next()
    harness.add("one more")
    harness.next()
    assert harness.engine.compiling == ["quick", *map(str, range(63)), "one more"]
    # The least recently used one has made room.
    harness.add("0")
    assert harness.next() == ("0", "0", None)
    assert harness.engine.compiling[-1] == "0"


def test_long_structures_are_kept_up_to_a_total_length(harness: Harness) -> None:
    texts = [letter * (1 << 18) for letter in "abcde"]
    for text in [*texts, texts[1], texts[0]]:
        harness.add(text)
        assert harness.next()[1] == text.upper()
    assert harness.engine.compiling == [*texts, texts[0]]
