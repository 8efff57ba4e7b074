"""Stop strings cut text exactly, wherever the pieces end in which it arrives."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from conch.backends.io_formats.text import StoppingText, StopStrings


def run(pieces: list[str], stops: list[str], *, included: bool = False) -> tuple[list[str], bool]:
    text = StoppingText(StopStrings(stops) if stops else None, included=included)
    out = []
    for piece in pieces:
        out.append(text.add(piece))
        if text.stop:
            return out, True
    out.append(text.flush())
    return out, False


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "stopped"),
    [
        (["Hello", " world"], [], "Hello world", False),
        (["Hello", " world"], ["wor"], "Hello ", True),
        (["one\n", "\nQ", ":", " two"], ["\n\nQ:"], "one", True),
        (["one\n", "\nA", ":"], ["\n\nQ:"], "one\n\nA:", False),
        (["ab"], ["b", "ab"], "", True),
        (["aaab"], ["aab"], "a", True),
        (["a", "a", "a", "b"], ["aab"], "a", True),
        (["stop"], ["stop"], "", True),
        (["é", "t", "é!"], ["té"], "é", True),
    ],
)
def test_text_ends_before_the_first_stop_string(
    pieces: list[str], stops: list[str], expected: str, stopped: bool
) -> None:
    out, ended = run(pieces, stops)
    assert "".join(out) == expected
    assert ended is stopped


def test_the_string_may_be_part_of_the_text() -> None:
    assert run(["one, t", "wo, three"], ["two"], included=True) == (["one, ", "two"], True)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    assert run(["abc", "x<", "b", "</s"], ["</s>"])[0] == ["abc", "x", "<b", "", "</s"]


def test_any_division_into_pieces_gives_the_same_text() -> None:
    chance = random.Random(4)
    for _ in range(300):
        text = "".join(chance.choices("ab\n", k=20))
        stops = ["".join(chance.choices("ab\n", k=chance.randint(2, 4)))]
        cuts = sorted(chance.sample(range(1, 20), 5))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, 20], strict=True)]
        found = text.find(stops[0])
        assert "".join(run(pieces, stops)[0]) == (text if found < 0 else text[:found])


def test_many_long_strings_take_no_more_memory_than_they_are_long() -> None:
    strings = [f"{number:03}" + "a" * 1021 for number in range(128)]
    tracemalloc.start()
    text = StoppingText(StopStrings(strings))
    out = "".join(text.add(piece) for piece in ["x00", "5", *["aaaa"] * 200])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert out + text.add("b") + text.flush() == "x005" + "a" * 800 + "b"
