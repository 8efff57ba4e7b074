"""What callers give as tensors, and what they get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch.client.values import decode, encode_inputs, from_values
from conch.core.errors import ConchError
from conch.core.inference import ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, split_bytes
from tests.refusals import refused_argument


def signature(*specs: TensorSpec, batch: int = 8) -> ModelSignature:
    return ModelSignature("m", 1, batch, {spec.name: spec for spec in specs}, {})


def encoded(datatype: str, dims: tuple[int, ...], value: Any, batch: int = 8) -> WireTensor:
    return encode_inputs(signature(TensorSpec("x", datatype, dims), batch=batch), {"x": value})["x"]


def refusal(datatype: str, dims: tuple[int, ...], value: Any) -> str:
    return refused_argument(encoded, datatype, dims, value)


@pytest.mark.parametrize(
    ("dims", "value", "shape"),
    [
        ((3,), [[1, 2, 3], [4, 5, 6]], (2, 3)),
        ((3,), [1, 2, 3], (1, 3)),
        ((-1,), [1, 2, 3], (1, 3)),
        ((1,), [1, 2, 3], (3, 1)),
        ((1,), [[1], [2]], (2, 1)),
        ((1,), 5, (1, 1)),
        ((-1,), 5, (1, 1)),
        ((2, 1), [1, 2], (1, 2, 1)),
        ((2, 1), [[1, 2], [3, 4], [5, 6]], (3, 2, 1)),
        ((-1,), [], (1, 0)),
    ],
)
def test_batch_and_trailing_dimensions_of_one_may_be_left_out(
    dims: tuple[int, ...], value: Any, shape: tuple[int, ...]
) -> None:
    assert encoded("INT32", dims, value).shape == shape


@pytest.mark.parametrize("value", [[1, 2], [[1, 2], [3, 4]], 5, [[[1, 2, 3]]]])
def test_shape_that_could_mean_something_else_is_refused(value: Any) -> None:
    assert "input 'x' of model 'm' has the shape [-1,3]; got" in refusal("INT32", (3,), value)


def test_model_without_batches_takes_its_shape_alone() -> None:
    assert encoded("INT32", (3,), [1, 2, 3], batch=0).shape == (3,)
    with pytest.raises(ConchError, match=r"has the shape \[3\]; got \[1,3\]"):
        encoded("INT32", (3,), [[1, 2, 3]], batch=0)


def test_single_value_counts_for_every_row() -> None:
    specs = TensorSpec("text", "BYTES", (1,)), TensorSpec("limit", "INT32", (1,)), TensorSpec("lang", "BYTES", (1,))
    tensors = encode_inputs(signature(*specs), {"text": ["a", "bc"], "limit": 7, "lang": "de"})
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"text": (2, 1), "limit": (2, 1), "lang": (2, 1)}
    assert np.frombuffer(tensors["limit"].data, "<i4").tolist() == [7, 7]
    assert split_bytes(tensors["lang"].data) == [b"de", b"de"]


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("INT64", np.array([1, 2], np.int8), [1, 2]),
        ("UINT8", [0, 255], [0, 255]),
        ("INT32", np.array([True, False]), [1, 0]),
        ("FP32", [1, 2.5], [1.0, 2.5]),
        ("FP16", np.array([1.5, -2], np.float64), [1.5, -2.0]),
        ("FP64", [float("inf"), 1], [float("inf"), 1.0]),
        ("BOOL", [True, False], [True, False]),
        ("UINT64", [2**64 - 1, 0], [2**64 - 1, 0]),
    ],
)
def test_numbers_become_those_of_the_model(datatype: str, value: Any, expected: list[Any]) -> None:
    tensor = encoded(datatype, (2,), value)
    assert tensor.datatype == datatype
    assert decode(tensor).tolist() == [expected]


@pytest.mark.parametrize(
    ("datatype", "value", "reason"),
    [
        ("INT32", [1.0, 2.0, 3.0], "; got float64 ("),
        ("INT8", [1, 2, 300], "; 300 is out of its range"),
        ("UINT8", [1, -2, 3], "; -2 is out of its range"),
        ("BOOL", [0, 1, 1], "; got int64"),
        ("FP16", [1, 1e6, 2], "; 1000000.0 is out of its range"),
        ("FP32", ["1", "2", "3"], "; got <U1"),
        ("FP32", [[1, 2], [3]], "; the lists given have different lengths"),
        ("BYTES", [1, 2, 3], ", as str or bytes; got 1 (int)"),
        ("BYTES", ["a", "\ud800", "b"], "cannot be written in UTF-8"),
    ],
)
def test_what_would_become_another_value_is_refused(datatype: str, value: Any, reason: str) -> None:
    message = refusal(datatype, (3,), value)
    assert message.startswith(f"input 'x' of model 'm' takes {datatype}")
    assert reason in message


def test_unknown_input_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConchError, match=r"model 'm' has no input 'txet', only 'text'; did you mean 'text'\?"):
        encode_inputs(signature(TensorSpec("text", "BYTES", (1,))), {"txet": "a"})


def test_texts_are_given_as_str_or_bytes_and_come_as_bytes() -> None:
    tensor = encoded("BYTES", (2,), [["ä", b"\xff"]])
    array = decode(tensor)
    assert array.dtype == np.object_
    assert array.tolist() == [["ä".encode(), b"\xff"]]
    assert decode(encoded("BYTES", (2,), np.array([["a", "b"]]))).tolist() == [[b"a", b"b"]]
    empty = decode(WireTensor("x", "BYTES", (0, 2), b""))
    assert (empty.dtype, empty.shape) == (np.object_, (0, 2))


def test_bf16_is_rounded_to_the_nearest_and_comes_as_float32() -> None:
    values = [1.0, 1.00390625, 1.01171875, -2.5, float("inf"), 3e-39]  # ties in the middle of the second and the third
    array = decode(encoded("BF16", (6,), values))
    assert array.dtype == np.float32
    assert array[0, :5].tolist() == [1.0, 1.0, 1.015625, -2.5, float("inf")]
    assert np.isnan(decode(encoded("BF16", (1,), [float("nan")]))).all()


def test_arrays_are_the_callers_own() -> None:
    given = np.zeros((1, 3), np.float32)
    tensor = encoded("FP32", (3,), given)
    given[:] = 1
    array = decode(tensor)
    array[:] = 2
    assert decode(tensor).tolist() == [[0, 0, 0]]


def test_array_that_is_not_contiguous_is_read_in_its_order() -> None:
    assert decode(encoded("INT64", (3, 2), np.arange(6).reshape(2, 3).T)).tolist() == [[[0, 3], [1, 4], [2, 5]]]


@pytest.mark.parametrize("values", [["a", "b"], [["a"], ["b"]]])
def test_values_from_json_may_be_nested_or_flat(values: Any) -> None:
    assert from_values("x", "BYTES", (2, 1), values).tolist() == [[b"a"], [b"b"]]
    assert from_values("x", "FP32", (1, 1), 2).tolist() == [[2.0]]
