"""Requests of other shapes as one run, and its outputs as theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.base.backend_base import RaggedBatches
from conch.core.errors import ConchError
from conch.core.tensors import WireTensor, pack_bytes


def config(*, max_batch_size: int = 4, data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": max_batch_size,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", "2"], "allow_ragged_batch": True},
            {"name": "plain", "data_type": "TYPE_FP32", "dims": ["1"]},
        ],
        "output": [
            {"name": "y", "data_type": "TYPE_FP32", "dims": ["-1", "2"]},
            {"name": "sum", "data_type": "TYPE_FP32", "dims": ["1"]},
        ],
        **more,
    }


def request(*shape: int) -> Request:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tensors = {"x": WireTensor("x", "FP32", shape, x.tobytes())}
    tensors["plain"] = WireTensor("plain", "FP32", (shape[0], 1), bytes(4 * shape[0]))
    return Request(tensors, frozenset(("y", "sum")))


REQUESTS = [request(2, 3, 2), request(1, 1, 2)]


def test_elements_of_a_ragged_input_lie_end_to_end_and_other_inputs_row_by_row() -> None:
    joined = RaggedBatches(config()).join(REQUESTS)
    np.testing.assert_array_equal(joined["x"], [*range(12), 0, 1])
    assert joined["plain"].shape == (3, 1)


def test_texts_of_a_ragged_input_lie_end_to_end() -> None:
    texts = {"name": "x", "data_type": "TYPE_STRING", "dims": [-1], "allow_ragged_batch": True}
    data = [WireTensor("x", "BYTES", (1, len(some)), pack_bytes(some)) for some in ([b"a", b"b"], [b"c"])]
    joined = RaggedBatches(config(input=[texts])).join([Request({"x": one}, frozenset()) for one in data])
    assert joined["x"] == Strings((3,), [b"a", b"b", b"c"])


@pytest.mark.parametrize("data_type", ["TYPE_FP32", "TYPE_INT32"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [12, 2]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [12, 14]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 12, 14]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 12),
        ("BATCH_ITEM_SHAPE", [[3, 2], [3, 2], [1, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 3, 2, 1, 2]),
    ],
)
def test_batch_input_tells_the_shapes_of_its_source(kind: str, expected: Any, data_type: str) -> None:
    made = {"kind": kind, "target_name": ["t"], "data_type": data_type, "source_input": ["x"]}
    value = RaggedBatches(config(batch_input=[made])).join(REQUESTS)["t"]
    assert isinstance(value, np.ndarray)
    assert value.dtype == (np.float32 if data_type == "TYPE_FP32" else np.int32)
    np.testing.assert_array_equal(value, expected)


SCATTER = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"], "source_input": ["x"]}


def test_scattered_output_is_cut_by_the_shapes_of_its_source_and_others_by_rows() -> None:
    batches = RaggedBatches(config(batch_output=[SCATTER]))
    outputs = {"y": np.arange(14, dtype=np.float32), "sum": np.array([[1.0], [2.0], [3.0]])}
    first, second = batches.split(REQUESTS, outputs)
    np.testing.assert_array_equal(first.outputs["y"], np.arange(12).reshape(2, 3, 2))
    np.testing.assert_array_equal(first.outputs["sum"], [[1], [2]])
    np.testing.assert_array_equal(second.outputs["y"], [[[12, 13]]])
    np.testing.assert_array_equal(second.outputs["sum"], [[3]])


def test_scattered_texts_are_cut_as_well() -> None:
    batches = RaggedBatches(config(batch_output=[SCATTER]))
    results = batches.split(REQUESTS, {"y": Strings((14,), [*"abcdefghijklmn"])})
    assert results[1] == Result({"y": Strings((1, 1, 2), ["m", "n"])})


def test_output_too_small_for_its_requests_is_an_error_that_names_it() -> None:
    with pytest.raises(ConchError, match="output 'y' has 13 elements, but its requests' inputs require 14"):
        RaggedBatches(config(batch_output=[SCATTER])).split(REQUESTS, {"y": np.zeros((13,), np.float32)})


def test_output_with_dimensions_that_its_source_does_not_have_is_refused() -> None:
    deeper = [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 2, -1]}]
    with pytest.raises(ConchError, match="output 'y' of model 'm' takes its shape from input 'x', which has 3 dim"):
        RaggedBatches(config(batch_output=[SCATTER], output=deeper))


def test_models_without_any_of_it_are_joined_by_rows() -> None:
    assert not RaggedBatches(config(input=[])).needed
    assert RaggedBatches(config()).needed
