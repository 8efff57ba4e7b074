"""``pb_utils.Tensor`` and the datatypes that it knows.

Input tensors look straight into the memory that the request came in; output tensors keep the
model's array until they are sent.  Runs in the worker of a Python model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conch.backends.python import arguments, dlpack, strings
from conch.backends.python.datatypes import DATATYPE, DTYPE, NUMBER
from conch.backends.python.errors import TritonModelException
from conch.tensors import Buffer
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.lending import OutputLoan
from conch.workers.child.packing import INLINE_LIMIT, Descriptor, Packer

#: For what may be None and in a model that fits its configuration is not: a checker that does not know the
#: configuration then lets ``get_input_tensor_by_name(…).as_numpy()`` pass, and an editor completes it.
MaybeNone = Any


class Tensor:
    """A named tensor in CPU memory.  ``Tensor(name, array)`` makes an output of a model."""

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
            self._data = strings.encode(numpy_array)
        elif not numpy_array.flags.c_contiguous:
            numpy_array = numpy_array.copy(order="C")
        self._array: np.ndarray[Any, Any] | None = numpy_array

    @staticmethod
    def received(name: str, datatype: str, shape: Sequence[int], data: Buffer) -> Tensor:
        """A tensor whose bytes are in ``data``, unread so far."""
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
        """The number of the configuration's enum ``DataType``."""
        return NUMBER[self._datatype]

    def shape(self) -> list[int]:
        return list(self._shape)

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The data as an array: writable, and without a copy unless it is text or not aligned."""
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        if self._array is None:
            self._array = self._decode()
        return self._array

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares this tensor's memory."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._array is None:
            self._array = self._decode()
        return dlpack.export(self._array, self._datatype)

    def __dlpack__(self, stream: Any = None, **kwargs: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor that shares the memory of a DLPack capsule or of an object that gives one."""
        name = arguments.text(name, "from_dlpack: name")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        array, datatype = dlpack.load(tensor)
        result = Tensor.received(name, datatype, array.shape, b"")
        result._array = array
        result._data = None
        return result

    def pack(self, packer: Packer, copy: bool = False, place: OutputLoan | None = None) -> Descriptor:
        """Add this tensor to a frame, or write it to its ``place``; with ``copy``, later changes are not seen."""
        data: Any = self._data
        if data is None:
            array = self._array
            assert array is not None
            data = array.tobytes() if copy or array.nbytes < INLINE_LIMIT else array.reshape(-1).view(np.uint8)
        return packer.add(self._name, self._datatype, self._shape, data, place)

    def _decode(self) -> np.ndarray[Any, Any]:
        data: Any = self._data
        if self._datatype == "BYTES":
            return strings.decode(data, self._shape)
        dtype = DTYPE[self._datatype]
        array = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        if not array.flags.aligned:
            array = array.copy()
        return array.reshape(self._shape)


class ArrayUnpacker(BorrowingUnpacker):
    """Makes a request's input tensors."""

    def tensors(self, descriptors: Sequence[Descriptor]) -> list[Tensor]:
        return [Tensor.received(*self.take(descriptor)) for descriptor in descriptors]
