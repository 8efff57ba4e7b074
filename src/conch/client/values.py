"""Converts the values of callers to tensors, and tensors to NumPy arrays.

Does no I/O. Numbers are converted to the declared datatype if that preserves their values. A shape may omit the batch
dimension of a single row, and trailing dimensions of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conch.config.signature import no_such_input
from conch.core.errors import ConchError, internal, invalid
from conch.core.inference import ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, format_shape, pack_bytes, split_bytes

#: NumPy types by datatype; BYTES and BF16 have none.
_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip


def encode_inputs(signature: ModelSignature, values: Mapping[str, Any]) -> dict[str, WireTensor]:
    """Return the tensors of ``values`` by input name, with copied data.

    A scalar is repeated for every row of the other inputs. Raises INVALID_ARG for an unknown name and for values that
    do not fit their input.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in values.items():
        spec = signature.inputs.get(name)
        if spec is None:
            raise invalid(no_such_input(signature, name))
        arrays[name] = _array(signature, spec, value)
    batched = signature.max_batch_size > 0
    shapes = {
        name: _fitted(signature, signature.inputs[name], array.shape, batched)
        for name, array in arrays.items()
        if array.ndim
    }
    rows = next((shape[0] for shape in shapes.values()), 1) if batched else 1
    tensors: dict[str, WireTensor] = {}
    for name, array in arrays.items():
        spec = signature.inputs[name]
        shape = shapes.get(name)
        if shape is None:
            shape = _fitted(signature, spec, (), batched)
            if batched:
                shape = (rows, *shape[1:])
                array = np.broadcast_to(array, shape)
        data = pack_bytes(array.flat) if spec.datatype == "BYTES" else array.tobytes()
        tensors[name] = WireTensor(name, spec.datatype, shape, data)
    return tensors


def decode(tensor: WireTensor) -> NDArray[Any]:
    """Return the array of an output; it is writable and shares no memory with the tensor.

    Raises INTERNAL for data that does not fit the datatype and shape.
    """
    try:
        return _decoded(tensor)
    except (ConchError, KeyError, ValueError):
        raise _unfit(tensor.name, tensor.datatype, tensor.shape) from None


def _decoded(tensor: WireTensor) -> NDArray[Any]:
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        texts = np.empty(len(elements), np.object_)
        texts[:] = elements
        return texts.reshape(tensor.shape)
    if tensor.datatype == "BF16":
        upper = np.frombuffer(tensor.data, "<u2").astype("<u4")
        return (upper << 16).view("<f4").reshape(tensor.shape)
    return np.frombuffer(tensor.data, _TYPES[tensor.datatype]).reshape(tensor.shape).copy()


def from_values(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> NDArray[Any]:
    """Return the array of an output received as JSON: a scalar, or a nested or flat list.

    Raises INTERNAL for values that do not fit the datatype and shape.
    """
    try:
        if datatype == "BYTES":
            texts = _objects(values).reshape(-1)
            return _decoded(WireTensor(name, datatype, shape, pack_bytes(text.encode() for text in texts)))
        kind = np.dtype("<f4") if datatype == "BF16" else _TYPES[datatype]
        return np.array(values, kind).reshape(shape)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise _unfit(name, datatype, shape) from None


def _unfit(name: str, datatype: str, shape: Sequence[int]) -> ConchError:
    return internal(f"output '{name}' of the response is not {datatype} of shape {format_shape(shape)}")


def _array(signature: ModelSignature, spec: TensorSpec, value: Any) -> NDArray[Any]:
    """Return ``value`` as an array of the input's datatype, in the caller's shape.

    BF16 is returned as the upper halves of float32.
    """
    label = f"input '{spec.name}' of model '{signature.name}' takes {spec.datatype}"
    try:
        if spec.datatype == "BYTES":
            return _encoded(_objects(value), label)
        array = np.asarray(value)
        dtype = np.dtype("<f4") if spec.datatype == "BF16" else _TYPES[spec.datatype]
        if dtype == _TYPES["UINT64"] and not isinstance(value, np.ndarray):
            array = _large_integers(array, value)
    except ValueError:
        raise invalid(f"{label}; the lists given have different lengths") from None
    if array.dtype != dtype:
        array = _converted(array, dtype, label)
    return _upper_halves(array) if spec.datatype == "BF16" else array


def _objects(value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value.astype(np.object_)
    return np.array(value, dtype=np.object_)


def _encoded(texts: NDArray[Any], label: str) -> NDArray[Any]:
    encoded = np.empty(texts.shape, np.object_)
    for index, text in np.ndenumerate(texts):
        if isinstance(text, str):
            try:
                encoded[index] = text.encode()
            except UnicodeEncodeError as error:
                raise invalid(f"{label}; {text!r:.80} cannot be written in UTF-8: {error.reason}") from None
        elif isinstance(text, bytes):
            encoded[index] = text
        else:
            raise invalid(f"{label}, as str or bytes; got {text!r:.80} ({type(text).__name__})")
    return encoded


def _large_integers(array: NDArray[Any], value: Any) -> NDArray[Any]:
    """Return ``array``, or its integers as UINT64 if NumPy made floats or objects of values beyond INT64."""
    if array.dtype.kind in "fO":
        objects = _objects(value)
        if objects.size and all(type(element) is int and 0 <= element < 2**64 for element in objects.flat):
            return objects.astype("<u8")
    return array


def _converted(array: NDArray[Any], dtype: np.dtype[Any], label: str) -> NDArray[Any]:
    """Convert ``array`` to ``dtype``; refuses a change of values other than the rounding of floats."""
    kinds = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}[dtype.kind]
    if array.size and array.dtype.kind not in kinds:
        bfloat16 = array.dtype.name == "bfloat16" and dtype.kind == "f"
        if not bfloat16:
            raise invalid(f"{label}; got {array.dtype} ({array.flat[0]!r:.80})")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if array.size and not np.can_cast(array.dtype, dtype, "safe"):
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise invalid(f"{label}; {low if low < limits.min else high} is out of its range")
        elif bool((np.isinf(converted) & np.isfinite(array.astype("f8"))).any()):
            raise invalid(f"{label}; {array.flat[np.abs(array.astype('f8')).argmax()]} is out of its range")
    return converted


def _upper_halves(values: NDArray[Any]) -> NDArray[Any]:
    """Return the BF16 bits of float32 values, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype("<u4")) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


def _fitted(signature: ModelSignature, spec: TensorSpec, sizes: tuple[int, ...], batched: bool) -> tuple[int, ...]:
    """Return the full shape of values of the shape ``sizes``. Raises INVALID_ARG if they do not fit."""
    full = (-1, *spec.dims) if batched else spec.dims
    if not sizes and all(dim in (-1, 1) for dim in spec.dims):
        return (1,) * len(full)
    for shape in (sizes, (1, *sizes)) if batched else (sizes,):
        left_out = full[len(shape) :]
        if len(shape) <= len(full) and all(dim == 1 for dim in left_out):
            whole = (*shape, *left_out)
            if all(dim in (-1, size) for dim, size in zip(full, whole, strict=True)):
                return whole
    raise invalid(
        f"input '{spec.name}' of model '{signature.name}' has the shape {format_shape(full)}; got "
        f"{format_shape(sizes) if sizes else 'a single value'}"
    )
