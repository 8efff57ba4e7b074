"""Tensor data as JSON: elements of every datatype, their errors, and shapes that they must fill."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.wire.json.tensor import from_json


def refusal(datatype: str, count: int, data: Any) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        from_json("IN", datatype, count, data)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("datatype", "data", "packed"),
    [
        ("BOOL", [True, False], b"\1\0"),
        ("INT8", [-1, 2], b"\xff\2"),
        ("UINT16", [1, 65535], b"\1\0\xff\xff"),
        ("INT64", [-(2**63)], struct.pack("<q", -(2**63))),
        ("UINT64", [2**64 - 1], b"\xff" * 8),
        ("FP32", [1, 0.5], struct.pack("<2f", 1, 0.5)),
        ("FP64", [2**64], struct.pack("<d", 2.0**64)),
        ("BYTES", ["a", "é\0"], b"\1\0\0\0a\3\0\0\0\xc3\xa9\0"),
    ],
)
def test_elements_become_little_endian_bytes(datatype: str, data: list[Any], packed: bytes) -> None:
    assert from_json("IN", datatype, len(data), data) == packed


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2], 3, [[4]]], [[], [1, [2, 3]], 4]])
def test_nesting_of_data_does_not_matter(data: list[Any]) -> None:
    assert from_json("IN", "INT32", 4, data) == struct.pack("<4i", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("datatype", "value", "packed"),
    [
        ("INT8", 300, b"\x2c"),
        ("UINT8", 2**63, b"\0"),
        ("INT32", 2**31, b"\0\0\0\x80"),
        ("INT32", -(2**31) - 1, b"\xff\xff\xff\x7f"),
        ("UINT16", 65536 + 7, b"\7\0"),
    ],
)
def test_integers_are_cut_to_the_width_of_the_datatype(datatype: str, value: int, packed: bytes) -> None:
    assert from_json("IN", datatype, 1, [value]) == packed


def test_fp32_beyond_its_range_becomes_infinity() -> None:
    assert from_json("IN", "FP32", 1, [1e39]) == struct.pack("<f", math.inf)


@pytest.mark.parametrize(
    ("datatype", "values", "words"),
    [
        ("BOOL", [1, "x", None], "JSON non-boolean as boolean"),
        ("UINT8", [True, "x", 1.5, -1, None, {}, 2**64], "JSON non-unsigned-integer as unsigned-integer"),
        ("INT32", [True, "x", 1.5, None, {}, 2**63], "JSON non-signed-integer as signed-integer"),
        ("UINT64", [-1, 2**64], "JSON non-unsigned-integer as unsigned-integer"),
        ("INT64", [2**63, 1e30], "JSON non-signed-integer as signed-integer"),
        ("FP32", [True, "x", None, {}, 10**400], "JSON non-number as double"),
    ],
)
def test_elements_of_the_wrong_type_are_refused(datatype: str, values: list[Any], words: str) -> None:
    for value in values:
        assert refusal(datatype, 1, [value]) == (Code.INTERNAL, f"Unable to parse 'data': attempt to access {words}")


@pytest.mark.parametrize("value", [1, True, 1.5, None, {}])
def test_bytes_elements_must_be_strings(value: Any) -> None:
    message = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    assert refusal("BYTES", 2, ["a", value]) == (Code.INTERNAL, message)
    assert refusal("BYTES", 2, ["not UTF-8: \udcff", value]) == (Code.INTERNAL, message)


def test_number_of_elements_must_match_the_shape() -> None:
    more = "Unable to parse 'data': Shape does not match true shape of 'data' field"
    fewer = "Failed to parse 'data' field: shape does not match true shape"
    assert refusal("INT32", 2, [1, 2, "x"]) == (Code.INTERNAL, more)
    assert refusal("INT32", 2, [1]) == (Code.INTERNAL, fewer)
    wrong = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
    assert refusal("INT32", 2, [1, "x", "x"]) == (Code.INTERNAL, wrong)


@pytest.mark.parametrize("datatype", ["INT32", "BYTES", "FP16"])
def test_empty_tensor_ignores_the_data(datatype: str) -> None:
    assert from_json("IN", datatype, 0, ["x"]) == b""


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_not_read_from_json(datatype: str) -> None:
    assert refusal(datatype, 2, [1, 2]) == (
        Code.INVALID_ARG,
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input IN",
    )


def test_data_must_be_an_array() -> None:
    message = "Unable to parse 'data': attempt to access JSON non-array as array"
    for datatype in ("INT32", "BYTES"):
        assert refusal(datatype, 1, 5) == refusal(datatype, 1, None) == (Code.INTERNAL, message)


def test_a_deep_list_beside_many_elements_costs_no_more_than_they_do() -> None:
    deep: Any = 7
    for _ in range(98):
        deep = [deep]
    # Each level for itself would take minutes.
    data = from_json("A", "INT8", 1_000_001, [1] * 1_000_000 + [deep])
    assert data == bytes([1]) * 1_000_000 + bytes([7])
