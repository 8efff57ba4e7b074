from __future__ import annotations

import gc

import pytest

from conch.backends.batching.prefixes import PrefixIndex, common_length


def test_longest_common_beginning_in_whole_units_is_found() -> None:
    index = PrefixIndex(4)
    tokens = list(range(20))
    index.extend(1, "", tokens, 8)
    index.extend(2, "", tokens, 19)
    assert index.find("", tokens) == (2, 16)
    assert index.find("", [*tokens[:11], 99, 99]) in {(1, 8), (2, 8)}
    assert index.find("", [99, *tokens]) == (-1, 0)


def test_a_token_is_left_to_read() -> None:
    index = PrefixIndex(4)
    index.extend(1, "", list(range(8)), 8)
    assert index.find("", list(range(8))) == (1, 4)
    assert index.find("", list(range(9))) == (1, 8)


def test_slots_of_another_adapter_are_not_found() -> None:
    index = PrefixIndex(4)
    index.extend(1, "formal", list(range(8)), 8)
    assert index.find("", list(range(9))) == (-1, 0)
    assert index.find("formal", list(range(9))) == (1, 8)


def test_keys_without_slots_are_forgotten() -> None:
    def nodes() -> int:
        return sum(type(known).__name__ == "_Node" for known in gc.get_objects())

    before, index = nodes(), PrefixIndex(4)
    for slot in range(3):
        index.extend(slot, f"salt {slot}", list(range(8)), 8)
    assert nodes() > before
    for slot in range(3):
        index.truncate(slot, 0)
        assert index.find(f"salt {slot}", list(range(9))) == (-1, 0)
    assert nodes() == before


def test_slot_that_grows_is_extended() -> None:
    index = PrefixIndex(4)
    for count in range(1, 11):
        index.extend(1, "", list(range(10)), count)
        assert index.length(1) == count // 4 * 4


def test_shortened_slot_is_found_by_its_rest() -> None:
    index = PrefixIndex(4)
    tokens = list(range(13))
    index.extend(1, "", tokens, 12)
    index.extend(2, "", tokens, 8)
    assert index.repeated(2)
    assert not index.repeated(1)
    index.truncate(1, 7)
    assert (index.length(1), index.find("", tokens)) == (4, (2, 8))
    index.truncate(2, 0)
    assert (index.length(2), index.find("", tokens)) == (0, (1, 4))
    index.truncate(1, 0)
    assert index.find("", tokens) == (-1, 0)


@pytest.mark.parametrize(
    ("tokens", "others", "length"),
    [
        (range(10), range(10), 8),
        (range(8), range(8), 4),  # a token is left to read
        (range(9), range(7), 4),
        ([0, 1, 2, 9, 4, 5], range(6), 0),
    ],
)
def test_common_length(tokens: range, others: range, length: int) -> None:
    assert common_length(list(tokens), list(others), 4) == length
