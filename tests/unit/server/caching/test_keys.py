"""Which requests are the same to the response cache."""

from typing import Any

import pytest

from conch.core.inference import InferRequest
from conch.core.tensors import StoredData, WireTensor
from conch.server.caching.cache import request_key


def key(*tensors: tuple[str, str, tuple[int, ...], bytes], **fields: Any) -> bytes:
    inputs = {name: WireTensor(name, datatype, shape, data) for name, datatype, shape, data in tensors}
    return request_key(InferRequest("m", inputs, lambda response: None, **fields))


X = ("x", "FP32", (1, 2), b"abcdefgh")
Z = ("z", "UINT8", (1,), b"i")


def test_order_of_inputs_and_outputs_the_id_and_the_priority_do_not_count() -> None:
    assert key(X, Z, outputs=("a", "b")) == key(Z, X, outputs=("b", "a"), id="7", priority=3, timeout=5)
    assert key(("x", "FP32", (1, 2), memoryview(X[3])), Z) == key(X, Z)


@pytest.mark.parametrize(
    ("tensor", "fields"),
    [
        (("y", *X[1:]), {}),
        (("x", "INT32", *X[2:]), {}),
        (("x", "FP32", (2, 1), X[3]), {}),
        (("x", "FP32", (1, 2), b"abcdefgi"), {}),
        (X, {"outputs": ("a",)}),
        (X, {"parameters": {"temperature": 0.5}}),
        (X, {"flags": 1}),
    ],
)
def test_whatever_the_model_sees_counts(
    tensor: tuple[str, str, tuple[int, ...], bytes], fields: dict[str, Any]
) -> None:
    assert key(tensor, **fields) != key(X)


def test_bytes_do_not_move_from_one_input_to_the_next() -> None:
    assert key(("a", "UINT8", (2,), b"ab"), ("b", "UINT8", (1,), b"c")) != key(
        ("a", "UINT8", (1,), b"a"), ("b", "UINT8", (2,), b"bc")
    )


class Changing(StoredData):
    """Memory of a client that writes there all the time."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8

    def read_into(self, target: memoryview) -> None:
        self.reads += 1
        target[:] = bytes([self.reads] * 8)


def test_inputs_in_shared_memory_are_read_once_for_the_key_and_for_the_model() -> None:
    stored = Changing()
    request = InferRequest("m", {"x": WireTensor("x", "FP32", (1, 2), stored)}, lambda response: None)  # type: ignore[arg-type]
    found = request_key(request)
    assert request.inputs["x"].data == bytes([1] * 8) and stored.reads == 1
    assert found == key(("x", "FP32", (1, 2), bytes([1] * 8)))
