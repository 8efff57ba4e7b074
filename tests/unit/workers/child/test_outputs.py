"""Outputs that a model gives in vain, and that it owes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conch.workers.child.packing import OutputWatch

Look = Callable[..., list[str]]


@pytest.fixture
def look() -> Look:
    """Look at responses with these outputs; returns what has been warned of so far."""
    warnings: list[str] = []
    watch = OutputWatch("m", warnings.append)
    watch.declare({"output": [{"name": "A", "data_type": "TYPE_FP32"}, {"name": "B", "data_type": "TYPE_FP32"}]})

    def look(
        *names: str,
        wanted: Any = ("A", "B"),
        whole: bool = True,
        rows: int | None = None,
        shape: tuple[int, ...] = (1, 2),
        datatype: str = "FP32",
    ) -> list[str]:
        watch.check([(name, datatype, shape, b"") for name in names], set(wanted), whole, rows)
        return warnings

    return look


def test_output_that_is_not_declared_is_reported_once(look: Look) -> None:
    look("A", "B", "EXTRA")
    assert look("A", "B", "EXTRA") == [
        "model 'm' returned the output 'EXTRA', which its configuration does not declare (it declares 'A', 'B'); "
        "clients do not receive it"
    ]


def test_output_that_does_not_come_is_reported_once(look: Look) -> None:
    look("A")
    assert look("A") == [
        "model 'm' did not return the output 'B', which its configuration declares and a request names; "
        "its response does not contain it"
    ]


def test_datatype_that_is_not_the_declared_one_is_reported_once_for_each_output(look: Look) -> None:
    look("A", "B", datatype="FP64")
    told = "model 'm' returned the output '{}' as FP64, but its configuration declares it as FP32; clients receive FP64"
    assert look("A", "B", datatype="FP64") == [told.format("A"), told.format("B")]


@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_rows_that_are_not_those_of_the_request_are_reported_once_for_each_output(
    look: Look, shape: tuple[int, ...]
) -> None:
    look("A", wanted=("A",), rows=1, shape=shape)
    assert look("A", wanted=("A",), rows=1, shape=shape) == [
        f"model 'm' returned the output 'A' in the shape {list(shape)} for a request with the batch size "
        "1, which must be its first dimension; it is sent unchanged"
    ]


def test_outputs_with_the_rows_of_the_request_are_not_told(look: Look) -> None:
    look("A", "B", rows=1)
    assert look("A", "B", shape=(3, 2)) == []


def test_outputs_that_are_as_they_should_be_are_not_told(look: Look) -> None:
    look("B", "A")
    look("A", "B", wanted=("A",))
    look("A", wanted=("A",))
    assert look("A", whole=False) == []


@pytest.mark.parametrize(
    ("most", "more", "right", "wrong", "declared"),
    [
        (0, {}, [(3, 7), (3, 8)], (3, 7, 1), [3, -1]),
        (0, {}, [(3, 1)], (4, 1), [3, -1]),
        (8, {}, [(1, 3, 7), (2, 3, 1)], (1, 4, 7), [-1, 3, -1]),
        (8, {}, [(2, 3, 1)], (3, 1), [-1, 3, -1]),
        (0, {"reshape": {"shape": [-1]}}, [(21,)], (3, 7), [-1]),
        (0, {"reshape": {}}, [()], (1,), []),
    ],
)
def test_shape_that_is_not_the_declared_one_is_reported_once(
    most: int, more: dict[str, Any], right: list[tuple[int, ...]], wrong: tuple[int, ...], declared: list[int]
) -> None:
    warnings: list[str] = []
    watch = OutputWatch("m", warnings.append)
    output = {"name": "A", "data_type": "TYPE_FP32", "dims": [3, -1], **more}
    watch.declare({"max_batch_size": most, "output": [output]})

    def look(shape: tuple[int, ...]) -> None:
        watch.check([("A", "FP32", shape, b"")], {"A"}, True, None)

    for shape in right:
        look(shape)
    assert warnings == []
    for shape in (wrong, wrong, *right, wrong):
        look(shape)
    assert warnings == [
        f"model 'm' returned the output 'A' in the shape {list(wrong)}, but its configuration declares it as {declared}"
        "; it is sent unchanged"
    ]


def test_models_that_make_up_names_are_reported_a_few_times(look: Look) -> None:
    for number in range(100):
        look("A", "B", f"N{number}")
    assert len(look("A", "B")) == 16
