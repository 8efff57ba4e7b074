"""The classification extension."""

from __future__ import annotations

import math
import struct

import pytest

from conch.core.errors import Code, ConchError
from conch.core.tensors import NATIVE_FORMAT, WireTensor, split_bytes
from conch.wire.classification import classify


def top(count: int, values: list[float], datatype: str = "FP32", labels: list[str] | None = None) -> list[bytes]:
    data = struct.pack(f"<{len(values)}{NATIVE_FORMAT[datatype]}", *values)
    tensor = classify(WireTensor("A", datatype, (len(values),), data), count, labels, False)
    assert (tensor.datatype, tensor.shape) == ("BYTES", (min(count, len(values)),))
    return split_bytes(tensor.data)


def test_of_equal_values_the_first_comes_first() -> None:
    assert top(4, [1, 2, 2, 1, 2]) == [b"2.000000:1", b"2.000000:2", b"2.000000:4", b"1.000000:0"]


def test_more_classes_than_values_gives_all_values() -> None:
    assert top(2**63, [1, 2]) == [b"2.000000:1", b"1.000000:0"]


@pytest.mark.parametrize(
    ("datatype", "values"), [("UINT64", [2**64 - 1, 0]), ("INT64", [-(2**63), 5]), ("UINT8", [0, 1])]
)
def test_integers_are_written_as_integers(datatype: str, values: list[float]) -> None:
    largest = max(values)
    assert top(1, values, datatype) == [f"{largest}:{values.index(largest)}".encode()]


def test_numbers_are_written_like_printf() -> None:
    assert top(3, [-1.5, 1e10, 1e-9]) == [b"10000000000.000000:1", b"0.000000:2", b"-1.500000:0"]


def test_infinity_does_not_disturb() -> None:
    assert top(2, [1, math.inf, -math.inf]) == [b"inf:1", b"1.000000:0"]


def test_missing_and_empty_labels_are_left_out() -> None:
    assert top(3, [3, 2, 1], "INT8", ["é", ""]) == ["3:0:é".encode(), b"2:1", b"1:2"]


@pytest.mark.parametrize("batched", [True, False])
def test_output_without_elements_has_no_classes(batched: bool) -> None:
    tensor = classify(WireTensor("A", "FP32", (2, 0), b""), 3, None, batched)
    assert (tensor.shape, tensor.data) == ((2, 0) if batched else (0,), b"")


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16"])
def test_datatypes_without_order_are_refused(datatype: str) -> None:
    with pytest.raises(ConchError) as caught:
        classify(WireTensor("A", datatype, (0,), b""), 1, None, False)
    message = f"class result not available for output due to unsupported type '{datatype}'"
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)


def test_output_too_large_to_sort_is_refused() -> None:
    with pytest.raises(ConchError, match="classification output tensor too large"):
        classify(WireTensor("A", "INT8", (1_000_001,), bytes(1_000_001)), 1, None, False)


def test_rows_are_sorted_each_for_itself() -> None:
    data = struct.pack("<4f", 1, 2, 4, 3)
    tensor = classify(WireTensor("A", "FP32", (2, 2), data), 1, ["a", "b"], True)
    assert (tensor.shape, split_bytes(tensor.data)) == ((2, 1), [b"2.000000:1:b", b"4.000000:0:a"])


def test_more_classes_than_anybody_reads_are_refused() -> None:
    with pytest.raises(ConchError, match="more than 50000 classes"):
        classify(WireTensor("A", "INT8", (50_001, 2), bytes(100_002)), 1, None, True)
