"""Cached responses, in memory or serialized for another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Any, Final

from conch.core.errors import ConchError
from conch.core.inference import InferResponse, ParameterValue
from conch.core.tensors import ELEMENT_SIZE, WireTensor, split_bytes

#: Approximate memory overhead of an entry (key and index), and of each of its tensors (bytes).
_ENTRY_BYTES: Final = 500
_TENSOR_BYTES: Final = 300
#: The version of the layout and the size of the header.
_HEAD: Final = Struct("<BI")
_LAYOUT: Final = 1


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """The outputs and parameters of a response, with their own copy of the data; ``size`` is approximate (bytes)."""

    outputs: tuple[WireTensor, ...]
    parameters: Mapping[str, ParameterValue]
    size: int

    def response(self) -> InferResponse:
        """Return a new response for another request."""
        return InferResponse(list(self.outputs), parameters=self.parameters)


def kept(outputs: Sequence[WireTensor], parameters: Mapping[str, ParameterValue]) -> CachedResponse:
    """Copy a response into an entry; the original data may be part of a larger frame, which a reference would hold."""
    copies = tuple(WireTensor(output.name, output.datatype, output.shape, bytes(output.data)) for output in outputs)
    size = _ENTRY_BYTES + sum(_TENSOR_BYTES + len(copy.data) for copy in copies)
    size += sum(len(name) + len(str(value)) + 100 for name, value in parameters.items())
    return CachedResponse(copies, dict(parameters), size)


def packed(entry: CachedResponse) -> bytes:
    """Serialize an entry: a JSON header, then the data of the tensors."""
    # The json module accepts all parameter values, including NaN and integers of more than 64 bits.
    header = json.dumps({
        "outputs": [(output.name, output.datatype, output.shape, len(output.data)) for output in entry.outputs],
        "parameters": dict(entry.parameters),
    }, separators=(",", ":")).encode()  # fmt: skip
    return b"".join((_HEAD.pack(_LAYOUT, len(header)), header, *(output.data for output in entry.outputs)))


def unpacked(data: bytes) -> CachedResponse:
    """Deserialize an entry from :func:`packed`; raises ValueError for other data, which another program may store."""
    try:
        layout, length = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        if layout != _LAYOUT or at > len(data):
            raise ValueError("the head of the entry is another one")
        header: dict[str, Any] = json.loads(data[_HEAD.size : at])
        outputs = []
        for name, datatype, shape, size in header["outputs"]:
            outputs.append(_tensor(name, datatype, tuple(shape), data[at : at + size]))
            at += size
        if at != len(data):
            raise ValueError("the sizes of the tensors differ from the header")
        return kept(outputs, header["parameters"])
    except (ArithmeticError, AttributeError, ConchError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a cached response: {error}") from error
    except Exception as error:  # struct.error derives directly from Exception
        raise ValueError(f"not a cached response: {error}") from error


def _tensor(name: Any, datatype: Any, shape: tuple[Any, ...], data: bytes) -> WireTensor:
    if type(name) is not str or any(type(dim) is not int or dim < 0 for dim in shape):
        raise ValueError("a tensor has no name, or no shape")
    elements = len(split_bytes(data)) if datatype == "BYTES" else len(data) / ELEMENT_SIZE[datatype]
    if elements != prod(shape):
        raise ValueError(f"tensor '{name}' has {elements:g} elements, its shape {prod(shape)}")
    return WireTensor(name, datatype, shape, data)
