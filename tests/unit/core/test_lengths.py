"""How sequences are divided into runs."""

import random
from itertools import combinations

import pytest

from conch.core.lengths import OVERHEAD, bucket, on_grid, runs


def cost(division: list[list[int]], lengths: list[int]) -> int:
    return sum(OVERHEAD + len(run) * max(lengths[index] for index in run) for run in division)


def test_nothing_makes_no_run() -> None:
    assert runs([], budget=100) == []


def test_equal_lengths_share_a_run() -> None:
    assert runs([16, 16, 16], budget=1000) == [[0, 1, 2]]


def test_a_short_sequence_is_not_padded_beyond_its_bucket() -> None:
    assert runs([5, 250], budget=1000) == [[1], [0]]


def test_little_padding_is_cheaper_than_another_run() -> None:
    assert runs([20, 30], budget=1000) == [[1, 0]]


def test_much_padding_is_dearer_than_another_run() -> None:
    lengths = [60] + [33] * 10
    assert runs(lengths, budget=10_000) == [[0], list(range(1, 11))]


def test_no_run_exceeds_the_budget_but_for_a_single_sequence() -> None:
    lengths = [100] * 5 + [600]
    divided = runs(lengths, budget=256)
    assert divided[0] == [5]
    assert [len(run) for run in divided[1:]] == [2, 2, 1]


def test_no_run_has_more_sequences_than_the_limit() -> None:
    assert [len(run) for run in runs([10] * 10, budget=1000, limit=4)] == [4, 4, 2]


def test_sequences_of_one_index_stay_together() -> None:
    assert runs([10, 10, 10], budget=1000, limit=4, counts=[3, 3, 1]) == [[0], [1, 2]]


def test_every_index_is_in_one_run_within_its_bucket() -> None:
    chance = random.Random(3)
    for _ in range(200):
        lengths = [min(512, int(chance.lognormvariate(3, 1)) + 1) for _ in range(chance.randint(1, 60))]
        divided = runs(lengths, budget=1024)
        assert sorted(index for run in divided for index in run) == list(range(len(lengths)))
        for run in divided:
            longest = max(lengths[index] for index in run)
            assert len(run) * longest <= 1024
            assert longest <= min(bucket(lengths[index]) for index in run)


def test_division_costs_no_more_than_any_other_into_neighbours() -> None:
    chance = random.Random(4)
    for _ in range(50):
        lengths = sorted({8 * chance.randint(1, 32) for _ in range(chance.randint(2, 7))}, reverse=True)
        others = [
            [list(range(*ends)) for ends in zip((0, *cuts), (*cuts, len(lengths)), strict=True)]
            for size in range(len(lengths))
            for cuts in combinations(range(1, len(lengths)), size)
        ]
        allowed = [
            division for division in others
            if all(lengths[run[0]] <= bucket(lengths[run[-1]]) for run in division)
        ]  # fmt: skip
        assert cost(runs(lengths, budget=10**6), lengths) == min(cost(division, lengths) for division in allowed)


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((1, 16), (1, 16)),
        ((1, 17), (1, 24)),
        ((8, 100), (8, 112)),
        ((9, 3), (10, 8)),
        ((17, 8), (20, 8)),
        ((33, 300), (40, 320)),
    ],
)
def test_shapes_are_padded_to_a_grid(shape: tuple[int, int], padded: tuple[int, int]) -> None:
    assert on_grid(*shape) == padded
    assert on_grid(*padded) == padded


def test_the_grid_has_few_sizes_and_wastes_at_most_a_quarter() -> None:
    sizes = {on_grid(rows, 8)[0] for rows in range(1, 257)}
    assert len(sizes) < 30
    assert all(rows <= on_grid(rows, 8)[0] <= rows * 1.25 for rows in range(1, 257))
