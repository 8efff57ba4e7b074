"""Reads safetensors files into numpy arrays, including BF16, which numpy lacks and the library therefore refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.core.errors import invalid

Array = npt.NDArray[Any]

_DTYPES: Final[Mapping[str, str]] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return the tensors of a file by name, mapped into memory; BF16 becomes FP32.

    Raises INVALID_ARG for a file that cannot be read.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(data[begin:], entry) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise invalid(f"{path} cannot be read as a safetensors file: {error}") from None


def _tensor(data: Array, entry: Mapping[str, Any]) -> Array:
    start, end = entry["data_offsets"]
    array = data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of an FP32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
