"""Converts the typed fields of ``InferTensorContents`` to the bytes of a tensor.

Called by :mod:`conch.wire.grpc.infer` for inputs without raw contents; does no I/O.
"""

from __future__ import annotations

from array import array
from typing import Final

from tritonclient.grpc import service_pb2

from conch.core.errors import invalid
from conch.core.tensors import ELEMENT_SIZE, NATIVE_FORMAT, pack_bytes

#: The field of each datatype; FP16 and BF16 have none.
FIELD: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
#: The datatype named in the error for an unexpected field.
_CARRIES: Final = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def read_contents(contents: service_pb2.InferTensorContents, name: str, datatype: str, model: str) -> bytes:
    """Return the bytes of an input; integers too large for the datatype lose their upper bits.

    Raises INVALID_ARG for values in another field than the datatype's.
    """
    expected = FIELD.get(datatype, "")
    for field in _CARRIES:
        if field != expected and len(getattr(contents, field)):
            raise invalid(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}'"
                f" of type '{_CARRIES[field]}', expected datatype '{datatype}'"
            )
    if not expected:
        return b""
    values = getattr(contents, expected)
    if datatype == "BYTES":
        return pack_bytes(values)
    if datatype == "BOOL":
        return bytes(values)
    size = ELEMENT_SIZE[datatype]
    if expected in ("int_contents", "uint_contents") and size < 4:
        mask = (1 << 8 * size) - 1
        return array("B" if size == 1 else "H", [value & mask for value in values]).tobytes()
    return array(NATIVE_FORMAT[datatype], values).tobytes()
