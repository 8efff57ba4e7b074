"""The datatypes of tensors: protocol names, numbers of the configuration's enum ``DataType``, and numpy types.

Part of ``triton_python_backend_utils``; runs in the worker of a Python model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
