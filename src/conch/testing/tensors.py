"""What a test writes and reads as tensors: NumPy arrays, and where the configuration says the rest, lists and texts."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from conch.backends.python import strings
from conch.backends.python.datatypes import DATATYPE, DTYPE
from conch.inference import TensorSpec
from conch.tensors import WireTensor

Array = np.ndarray[Any, Any]

_BF16_SHIFT: Final = np.uint32(16)


def to_tensor(name: str, value: Any, spec: TensorSpec | None = None, *, batched: bool = False) -> WireTensor:
    """The tensor for ``value``.

    An array is taken as it is, shape and type.  Anything else becomes an array of the datatype of ``spec``, without
    which NumPy chooses; it may leave out the batch dimension of a ``batched`` model, or last dimensions of 1.
    Raises TypeError for a value that has no such datatype.
    """
    array = value if isinstance(value, np.ndarray) else _fitted(_array(name, value, spec), spec, batched)
    if spec is not None and spec.datatype == "BF16" and array.dtype == np.uint16:
        return WireTensor(name, "BF16", array.shape, array.tobytes())
    datatype = "BYTES" if array.dtype.kind in "SU" else DATATYPE.get(array.dtype)
    if datatype is None:
        raise TypeError(f"tensor '{name}': no model takes arrays of dtype {array.dtype}")
    data = strings.encode(array) if datatype == "BYTES" else array.tobytes()
    return WireTensor(name, datatype, array.shape, data)


def to_array(tensor: WireTensor) -> Array:
    """The array of a tensor: ``bytes`` as objects for BYTES, 32-bit floats for BF16."""
    if tensor.datatype == "BYTES":
        return strings.decode(tensor.data, tensor.shape)
    array = np.frombuffer(tensor.data, DTYPE[tensor.datatype]).reshape(tensor.shape)
    if tensor.datatype == "BF16":
        return (array.astype(np.uint32) << _BF16_SHIFT).view(np.float32)
    return array.copy()


def _array(name: str, value: Any, spec: TensorSpec | None) -> Array:
    found = np.asarray(value)
    if spec is None:
        return np.asarray(value, np.object_) if found.dtype.kind in "SU" else found
    if spec.datatype == "BYTES":
        array = np.asarray(value, np.object_)
        if not all(isinstance(element, str | bytes) for element in array.ravel()):
            raise TypeError(f"tensor '{name}' is BYTES: give texts or bytes, not {value!r:.100}")
        return array
    if spec.datatype == "BF16":
        return (found.astype(np.float32).view(np.uint32) >> _BF16_SHIFT).astype(np.uint16)
    wanted = DTYPE[spec.datatype]
    whole = found.dtype.kind in "iu" and wanted.kind in "iu"  # whether they are in its range is told by NumPy
    if found.size and not whole and not np.can_cast(found.dtype, wanted, "same_kind"):
        raise TypeError(f"tensor '{name}' is {spec.datatype}, which {value!r:.100} is not")
    return np.array(value, wanted) if found.size else np.empty(found.shape, wanted)


def _fitted(array: Array, spec: TensorSpec | None, batched: bool) -> Array:
    """``array`` with the dimensions that were left out, if there is a way to fit it to ``spec``."""
    if spec is None:
        return array
    missing = len(spec.dims) + batched - array.ndim
    if missing <= 0:
        return array
    if batched and _fits(array.shape, spec.dims):
        return array.reshape(1, *array.shape)
    return array.reshape(*array.shape, *[1] * missing)


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))
