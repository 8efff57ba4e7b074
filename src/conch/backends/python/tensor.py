"""``pb_utils.Tensor``, with conversion to and from numpy, DLPack and the wire format of BYTES.

Input tensors share the memory of the received request; output tensors keep the model's array until they are sent. The
C structures of DLPack 0.x (the capsule ``dltensor``) are implemented with ctypes, so that they work with any version of
numpy and any framework. Runs in the worker of a Python model.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import Any

import numpy as np

from conch.backends.python import arguments
from conch.backends.python.errors import TritonModelException
from conch.core.tensors import Buffer
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.buffers import OutputLoan
from conch.workers.child.packing import INLINE_LIMIT, Descriptor, Packer

#: By protocol name: the number of the configuration's enum, and the numpy type.
NUMBER: dict[str, int] = {
    "BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9,
    "FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14,
}  # fmt: skip
SCALAR: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip
DTYPE = {name: np.dtype(scalar) for name, scalar in SCALAR.items()}
DTYPE["BF16"] = np.dtype(np.uint16)  # as 16-bit values: numpy has no bfloat16
DATATYPE = {np.dtype(scalar): name for name, scalar in SCALAR.items()}

#: numpy types by the configuration's names; BF16 has none.
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    **{f"TYPE_{name}": scalar for name, scalar in SCALAR.items() if name not in ("BOOL", "BYTES")},
    "TYPE_STRING": np.object_,
}
_FROM_NUMBER = {NUMBER[name]: scalar for name, scalar in SCALAR.items()}
_TO_NUMBER = {scalar: number for number, scalar in _FROM_NUMBER.items()}
_TO_NUMBER[np.bytes_] = NUMBER["BYTES"]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type for a number of the configuration's enum; None if there is none."""
    return _FROM_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of the configuration's enum for a numpy type; None if there is none."""
    return next((number for scalar, number in _TO_NUMBER.items() if data_type == scalar), None)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type for ``TYPE_…``. Raises KeyError if there is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


_LENGTH = Struct("<I")
_unpack = _LENGTH.unpack_from
_pack = _LENGTH.pack


def decode_strings(data: Buffer | np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Decode to an object array of ``bytes``. Raises TritonModelException if data and shape do not match."""
    raw = bytes(data)
    elements: list[bytes] = []
    at, end = 0, len(raw)
    while at + 4 <= end:
        start = at + 4
        at = start + _unpack(raw, start - 4)[0]
        elements.append(raw[start:at])
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    if at != end:
        raise TritonModelException("The elements of a BYTES tensor do not fill its data.")
    try:
        return array.reshape(shape)
    except ValueError:
        raise TritonModelException(
            f"A BYTES tensor of shape {list(shape)} came with {len(elements)} elements."
        ) from None


def encode_strings(array: np.ndarray[Any, Any]) -> bytes:
    """Encode in row-major order: bytes unchanged, str as UTF-8, other objects as their ``str()``."""
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        if type(element) is not bytes:
            element = bytes(element) if isinstance(element, bytes) else str(element).encode()
        parts.append(_pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """Encode an array of objects or strings; returns () for an empty array, None for another kind of array."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OSU":
        return None
    return encode_strings(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: Buffer) -> np.ndarray[Any, Any]:
    """Decode to a flat object array."""
    elements = []
    at = 0
    while at < len(encoded_tensor):
        (length,) = _unpack(encoded_tensor, at)
        elements.append(Struct(f"<{length}s").unpack_from(encoded_tensor, at + 4)[0])
        at += 4 + length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


#: ``kDLCPU``, the device type of CPU memory; ``_PINNED`` is ``kDLCUDAHost``, page-locked CPU memory.
CPU = 1
_PINNED = 3

#: DLPack type code and bits by datatype, and the reverse.
_TYPE: dict[str, tuple[int, int]] = {
    "INT8": (0, 8), "INT16": (0, 16), "INT32": (0, 32), "INT64": (0, 64),
    "UINT8": (1, 8), "UINT16": (1, 16), "UINT32": (1, 32), "UINT64": (1, 64),
    "FP16": (2, 16), "FP32": (2, 32), "FP64": (2, 64), "BF16": (4, 16), "BOOL": (6, 8),
}  # fmt: skip
_DATATYPE = {type: name for name, type in _TYPE.items()}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FRESH = ctypes.c_char_p(b"dltensor")
_USED = ctypes.c_char_p(b"used_dltensor")


# The destructor runs when the capsule has no references left, so it gets the capsule's address instead of the object.
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))

#: Objects that exported structures point to, by address of the structure, until the consumer calls the deleter.
_exported: dict[int, tuple[Any, ...]] = {}


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_valid_at(capsule, _FRESH):  # the capsule was never consumed
        _delete(_pointer_at(capsule, _FRESH))


# Global, because C calls these callbacks as long as capsules exist.
_c_delete = _Deleter(_delete)
_c_destroy = _Deleter(_destroy)


def export(array: np.ndarray[Any, Any], datatype: str) -> Any:
    """Create a capsule for a C-contiguous array with elements of ``datatype`` (BF16 as 16-bit values)."""
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    code, bits = _TYPE[datatype]
    managed = _DLManagedTensor(deleter=ctypes.cast(_c_delete, ctypes.c_void_p))
    managed.tensor = _DLTensor(array.ctypes.data, CPU, 0, array.ndim, code, bits, 1, shape, None, 0)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, array)
    return _new(address, _FRESH, ctypes.cast(_c_destroy, ctypes.c_void_p))


def load(source: Any) -> tuple[np.ndarray[Any, Any], str]:
    """Return an array over the memory of a capsule, or of an object that provides one, and its datatype.

    Raises TritonModelException for unsupported objects, devices, datatypes and layouts.
    """
    if type(source).__name__ != "PyCapsule":
        if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule "
                "        or have `__dlpack__` and `__dlpack_device__` attributes"
            )
        _check_device(int(source.__dlpack_device__()[0]))
        source = source.__dlpack__()
    if not _is_valid_at(id(source), _FRESH):
        raise TritonModelException("The DLPack capsule has been used already or is not one of a tensor.")
    address = _pointer_at(id(source), _FRESH)
    tensor = _DLManagedTensor.from_address(address).tensor
    _check_device(tensor.device_type)
    datatype = _DATATYPE.get((tensor.code, tensor.bits))
    if datatype is None or tensor.lanes != 1:
        raise TritonModelException("DLPack dtype is not supported.")
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim]):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    size = prod(shape) * (tensor.bits // 8)
    memory = (ctypes.c_uint8 * size).from_address((tensor.data or 0) + tensor.byte_offset)
    weakref.finalize(memory, _release, address).atexit = False
    _rename(source, _USED)
    dtype = DTYPE[datatype]
    array = np.frombuffer(memory, dtype) if size else np.empty(0, dtype)
    return array.reshape(shape), datatype


def _release(address: int) -> None:
    deleter = _DLManagedTensor.from_address(address).deleter
    if deleter:
        _Deleter(deleter)(address)


def _check_device(device: int) -> None:
    if device not in (CPU, _PINNED):
        raise TritonModelException(
            "DLPack exchange of GPU tensors is not supported here: copy the tensor to the CPU first."
        )


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


#: Type of results that may be None, but are not if the model fits its configuration. With it, type checkers accept
#: ``get_input_tensor_by_name(…).as_numpy()``, and editors complete it.
MaybeNone = Any


class Tensor:
    """A named tensor in CPU memory. ``Tensor(name, array)`` creates an output of a model."""

    __slots__ = ("__weakref__", "_array", "_data", "_datatype", "_name", "_shape")

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        if not isinstance(name, str):
            name = arguments.text(name, "Tensor: name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor: the array must be a numpy.ndarray, not {type(numpy_array)}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = DATATYPE.get(numpy_array.dtype)
        if datatype is None:
            if numpy_array.dtype.kind not in "SU":
                raise TritonModelException("NumPy dtype is not supported.")
            datatype = "BYTES"
        self._name = name
        self._datatype = datatype
        self._shape: Sequence[int] = numpy_array.shape
        self._data: Buffer | None = None
        if datatype == "BYTES":
            self._data = encode_strings(numpy_array)
        elif not numpy_array.flags.c_contiguous:
            numpy_array = numpy_array.copy(order="C")
        self._array: np.ndarray[Any, Any] | None = numpy_array

    @staticmethod
    def received(name: str, datatype: str, shape: Sequence[int], data: Buffer) -> Tensor:
        """Create a tensor over the bytes ``data``, which are decoded on first use."""
        tensor = Tensor.__new__(Tensor)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = shape
        tensor._data = data
        tensor._array = None
        return tensor

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> int:
        """Return the datatype as a number of the configuration's enum ``DataType``."""
        return NUMBER[self._datatype]

    def shape(self) -> list[int]:
        return list(self._shape)

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the data as a writable array; copies only BYTES and unaligned data."""
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        if self._array is None:
            self._array = self._decode()
        return self._array

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule that shares this tensor's memory."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._array is None:
            self._array = self._decode()
        return export(self._array, self._datatype)

    def __dlpack__(self, stream: Any = None, **kwargs: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Create a tensor that shares the memory of a DLPack capsule, or of an object that provides one."""
        name = arguments.text(name, "from_dlpack: name")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        array, datatype = load(tensor)
        result = Tensor.received(name, datatype, array.shape, b"")
        result._array = array
        result._data = None
        return result

    def pack(self, packer: Packer, copy: bool = False, loan: OutputLoan | None = None) -> Descriptor:
        """Add this tensor to a frame, or write it to its ``loan``; with ``copy``, later changes are not sent."""
        data: Any = self._data
        if data is None:
            array = self._array
            assert array is not None
            data = array.tobytes() if copy or array.nbytes < INLINE_LIMIT else array.reshape(-1).view(np.uint8)
        return packer.add(self._name, self._datatype, self._shape, data, loan)

    def _decode(self) -> np.ndarray[Any, Any]:
        data: Any = self._data
        if self._datatype == "BYTES":
            return decode_strings(data, self._shape)
        dtype = DTYPE[self._datatype]
        array = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        if not array.flags.aligned:
            array = array.copy()
        return array.reshape(self._shape)


class ArrayUnpacker(BorrowingUnpacker):
    """Unpacks the input tensors of a request."""

    def tensors(self, descriptors: Sequence[Descriptor]) -> list[Tensor]:
        return [Tensor.received(*self.take(descriptor)) for descriptor in descriptors]
