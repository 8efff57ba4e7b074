"""The elements of a tensor as trace files show them; pure."""

from __future__ import annotations

import struct

from conch.errors import ConchError
from conch.tensors import ELEMENT_SIZE, NATIVE_FORMAT, WireTensor, split_bytes


def data_text(tensor: WireTensor) -> str:
    """The elements with commas between them: numbers as C++ prints them, texts in quotes.

    Empty for FP16 and BF16, as in Triton.  Bytes that are no UTF-8 are shown by replacement characters.
    """
    if tensor.datatype == "BYTES":
        try:
            elements = split_bytes(tensor.data)
        except ConchError:
            return ""
        return ",".join(f'"{element.decode("utf-8", "replace")}"' for element in elements)
    code = NATIVE_FORMAT.get(tensor.datatype)
    if code is None:
        return ""
    count = len(tensor.data) // ELEMENT_SIZE[tensor.datatype]
    values = struct.unpack_from(f"<{count}{code}", tensor.data)
    if tensor.datatype in ("FP32", "FP64"):
        return ",".join(format(value, "g") for value in values)
    return ",".join(str(int(value)) for value in values)
