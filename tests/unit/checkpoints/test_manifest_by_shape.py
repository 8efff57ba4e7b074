"""Which of two variants runs a batch, by what was measured at a few shapes."""

from __future__ import annotations

import pytest

from conch.checkpoints.manifest import Companion, Gain, ShapeTable
from conch.core.lengths import on_grid


def companion(*gains: float) -> Companion:
    shapes = [(1, 16), (1, 64), (4, 16), (4, 64)]
    return Companion("b", tuple(Gain(*shape, gain) for shape, gain in zip(shapes, gains, strict=True)))


def test_between_shapes_numbers_are_interpolated_by_logarithms() -> None:
    table = ShapeTable({(1, 16): 1.0, (1, 64): 4.0, (4, 16): 16.0, (4, 64): 64.0})

    assert table.at(1, 16) == pytest.approx(1)
    assert table.at(4, 64) == pytest.approx(64)
    assert table.at(1, 32) == pytest.approx(2)
    assert table.at(2, 16) == pytest.approx(4)
    assert table.at(2, 32) == pytest.approx(8)


def test_outside_of_what_was_measured_the_nearest_shape_counts() -> None:
    table = ShapeTable({(1, 16): 1.0, (1, 64): 4.0, (4, 16): 16.0, (4, 64): 64.0})

    assert table.at(1, 2) == pytest.approx(1)
    assert table.at(99, 999) == pytest.approx(64)


def test_it_runs_where_it_is_faster_and_not_where_it_is_slower_or_equal() -> None:
    found = companion(2.0, 1.0, 1.0, 0.5)

    assert found.faster_at(1, 16) and found.faster_at(1, 24) and found.faster_at(2, 16)
    assert not found.faster_at(1, 64)
    assert not found.faster_at(4, 64)
    assert not found.faster_at(32, 512)


def test_batch_has_the_same_variant_whether_or_not_an_engine_pads_it() -> None:
    found = companion(2.0, 0.7, 0.9, 0.5)

    shapes = [(rows, tokens) for rows in range(1, 6) for tokens in range(1, 80)]
    assert len({found.faster_at(*shape) for shape in shapes}) == 2
    assert all(found.faster_at(*shape) == found.faster_at(*on_grid(*shape)) for shape in shapes)


@pytest.mark.parametrize(
    "gains",
    [
        (),
        (Gain(1, 16, 1.2), Gain(4, 64, 1.2)),
        (Gain(1, 16, 0.0),),
        (Gain(0, 16, 1.2), Gain(8, 16, 1.2)),
        (Gain(1, -3, 1.2),),
    ],
)
def test_table_with_holes_is_refused(gains: tuple[Gain, ...]) -> None:
    with pytest.raises(ValueError, match=r"for each batch size|of 1 at least|math domain|expected a positive"):
        Companion("b", gains)
