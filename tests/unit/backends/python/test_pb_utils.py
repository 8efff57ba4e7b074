"""The classes of ``triton_python_backend_utils`` by themselves, without a worker."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import weakref
from typing import Any

import numpy as np
import pytest

from conch.backends.python import pb_utils
from conch.backends.python.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    PreferredMemory,
    Tensor,
    TritonError,
    TritonModelException,
)
from conch.core.errors import Code
from conch.core.tensors import PROTOCOL_NAME

TENSOR = Tensor("T", np.zeros(2, np.float32))


def test_tensor_keeps_the_array_it_was_given() -> None:
    values = np.arange(4.0).reshape(2, 2)
    tensor = Tensor("T", values)
    assert tensor.as_numpy() is values
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("T", [2, 2], 12, True)


@pytest.mark.parametrize("dtype", [">i4", "complex64", "V3", "datetime64[s]", "longdouble"])
def test_array_of_a_type_that_does_not_travel_is_refused(dtype: str) -> None:
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("T", np.zeros(2, dtype))


@pytest.mark.parametrize("arguments", [("T", [1, 2]), ("T", 3), ("T", None), (None, np.zeros(1))])
def test_tensor_of_something_else_is_a_type_error(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError):
        Tensor(*arguments)


def test_every_datatype_has_its_number_and_numpy_type() -> None:
    for config_name, name in PROTOCOL_NAME.items():
        if name == "BF16":
            with pytest.raises(KeyError):
                pb_utils.triton_string_to_numpy(config_name)
            continue
        scalar = pb_utils.triton_string_to_numpy(config_name)
        number = Tensor("T", np.zeros(1, scalar)).triton_dtype()
        assert np.dtype(pb_utils.triton_to_numpy_type(number)) == np.dtype(scalar)
        assert pb_utils.numpy_to_triton_type(np.dtype(scalar)) == number
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


def test_strings_serialise_and_back() -> None:
    packed = pb_utils.serialize_byte_tensor(np.array([b"a", "ü", 5], dtype=object))
    assert packed == b"\1\0\0\0a\2\0\0\0\xc3\xbc\1\0\0\x005"
    assert pb_utils.deserialize_bytes_tensor(packed).tolist() == [b"a", "ü".encode(), b"5"]
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_numpy_reads_a_tensor_through_dlpack(dtype: str) -> None:
    values = np.array([[0, 1, 2], [3, 4, 100]]).astype(dtype)
    assert np.array_equal(np.from_dlpack(Tensor("T", values)), values)
    assert Tensor("T", values).__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_tensor_is_made_from_numpy_through_dlpack(dtype: str) -> None:
    values = np.array([[0, 1, 2], [3, 4, 100]]).astype(dtype)
    for source in (values, values.__dlpack__(), Tensor("X", values), Tensor("X", values).to_dlpack()):
        tensor = Tensor.from_dlpack("T", source)
        assert tensor.as_numpy().dtype == values.dtype
        assert np.array_equal(tensor.as_numpy(), values)
        assert np.shares_memory(tensor.as_numpy(), values)


def test_shapes_without_elements_or_dimensions_go_through_dlpack() -> None:
    for values in (np.zeros((0, 3)), np.array(5.0)):
        assert np.array_equal(np.from_dlpack(Tensor("T", values)), values)
        assert np.array_equal(Tensor.from_dlpack("T", values).as_numpy(), values)


def test_exported_memory_is_kept_until_the_consumer_has_done_with_it() -> None:
    values = np.zeros(1000)
    alive = weakref.ref(values)
    view = np.from_dlpack(Tensor("T", values))
    del values
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_capsule_that_is_not_taken_lets_go_of_its_memory() -> None:
    values = np.zeros(1000)
    alive = weakref.ref(values)
    capsule = Tensor("T", values).to_dlpack()
    del values, capsule
    gc.collect()
    assert alive() is None


def test_imported_memory_is_given_back_once() -> None:
    values = np.zeros(1000)
    alive = weakref.ref(values)
    tensor = Tensor.from_dlpack("T", values)
    part = tensor.as_numpy()[10:]
    del values, tensor
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_bf16_goes_through_dlpack_and_not_through_numpy() -> None:
    tensor = Tensor.received("T", "BF16", (2,), bytearray(b"\x80\x3f\x00\x40"))
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()
    copy = Tensor.from_dlpack("T", tensor)
    assert copy.triton_dtype() == 14
    with pytest.raises(TritonModelException, match="BF16"):
        copy.as_numpy()


def test_strings_do_not_go_through_dlpack() -> None:
    with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string tensors\.$"):
        Tensor("T", np.array([b"a"])).to_dlpack()


class FakeTensor:
    """Claims to be on a device."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __dlpack__(self) -> None:
        raise AssertionError("asked for memory that cannot be used")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.arange(6.0).reshape(2, 3).T, "DLPack tensor is not contiguous. Only contiguous DLPack tensors"),
        (5, "Provided tensor is not supported. Tensor must be a DLPack capsule"),
        (np.zeros(2, np.complex64), "DLPack dtype is not supported."),
        (FakeTensor(2), "GPU tensors is not supported"),
    ],
)
def test_memory_that_cannot_be_taken_over_is_refused(source: Any, message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        Tensor.from_dlpack("T", source)


def test_capsule_is_good_for_one_tensor() -> None:
    capsule = np.zeros(2).__dlpack__()
    Tensor.from_dlpack("T", capsule)
    with pytest.raises(TritonModelException, match="used already"):
        Tensor.from_dlpack("T", capsule)
    other = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )(1, b"other", None)
    with pytest.raises(TritonModelException):
        Tensor.from_dlpack("T", other)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.extras
def test_torch_and_tensors_share_memory() -> None:
    import torch

    ours = Tensor("T", np.arange(4, dtype=np.float32))
    theirs = torch.from_dlpack(ours)
    theirs += 1
    assert ours.as_numpy().tolist() == [1, 2, 3, 4]
    assert Tensor.from_dlpack("T", theirs).as_numpy().tolist() == [1, 2, 3, 4]
    half = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal(torch.from_dlpack(Tensor.from_dlpack("T", half)), half)


def test_response_tells_what_it_was_made_of() -> None:
    error = TritonError("boo", TritonError.NOT_FOUND)
    response = InferenceResponse([TENSOR], error, {"a": 1})
    assert (response.has_error(), response.error(), response.output_tensors()) == (True, error, [TENSOR])
    assert (error.message(), error.code(), response.parameters()) == ("boo", TritonError.NOT_FOUND, '{"a": 1}')
    assert not InferenceResponse([TENSOR]).has_error()
    assert pb_utils.get_output_tensor_by_name(response, "T") is TENSOR
    assert pb_utils.get_output_tensor_by_name(response, "U") is None


@pytest.mark.parametrize("arguments", [(None,), (["x"],), (TENSOR,), ([], "boo")])
def test_response_of_something_else_is_a_type_error(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        InferenceResponse(*arguments)


def test_response_with_a_missing_tensor_is_refused() -> None:
    with pytest.raises(TritonModelException, match=r"^Output tensor for inference response should not be empty\.$"):
        InferenceResponse([None])  # type: ignore[list-item]


def test_error_codes_are_those_of_the_server() -> None:
    assert [code.name for code in type(TritonError.UNKNOWN)] == [code.name for code in Code]
    for arguments in ((5,), ("x", 2)):
        with pytest.raises(TypeError):
            TritonError(*arguments)


def test_request_of_a_model_tells_what_it_was_made_of() -> None:
    request = InferenceRequest(
        inputs=[TENSOR],
        requested_output_names=["O"],
        model_name="m",
        request_id="r",
        correlation_id=5,
        flags=1,
        timeout=7,
        preferred_memory=PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        parameters={"a": 1, "b": True, "c": "é"},
    )
    assert request.inputs() == [TENSOR]
    assert request.requested_output_names() == {"O"}
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("r", 5, 1, 7)
    assert request.parameters() == '{"a": 1, "b": true, "c": "\\u00e9"}'
    request.set_flags(3)
    assert request.flags() == 3
    assert pb_utils.get_input_tensor_by_name(request, "T") is TENSOR
    assert pb_utils.get_input_tensor_by_name(request, "U") is None
    for ask in (request.is_cancelled, request.get_response_sender):
        with pytest.raises(TritonModelException, match="no client"):
            ask()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": [None]}, "Input tensor for request with id 'r' and model name 'm' should not be empty."),
        (
            {"requested_output_names": ["O", ""]},
            "Requested output name for request with id 'r' and model name 'm' should not be empty.",
        ),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"parameters": {"a": 1.5}}, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ({"parameters": {1: 1}}, "Expect parameters keys to have type str, found type <class 'int'>"),
    ],
)
def test_request_with_something_wrong_is_refused(fields: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"inputs": [TENSOR], "requested_output_names": ["O"], "model_name": "m", "request_id": "r"}
    with pytest.raises(TritonModelException) as raised:
        InferenceRequest(**{**right, **fields})
    assert str(raised.value) == message


@pytest.mark.parametrize("field", ["inputs", "requested_output_names", "model_name"])
def test_request_without_what_it_needs_is_a_type_error(field: str) -> None:
    fields: dict[str, Any] = {"inputs": [TENSOR], "requested_output_names": ["O"], "model_name": "m"}
    del fields[field]
    with pytest.raises(TypeError, match="InferenceRequest needs inputs, requested_output_names and model_name"):
        InferenceRequest(**fields)


def test_text_may_be_given_as_utf_8() -> None:
    assert TritonError("ä".encode()).message() == "ä"  # type: ignore[arg-type]
    assert Tensor("ä".encode(), np.zeros(1)).name() == "ä"  # type: ignore[arg-type]
