"""Between tasks and graphs: a caller's arrays as a graph takes them, a graph's outputs as tasks want them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from conch.backends.graphs.signature import GraphTensor
from conch.backends.native.arrays import DTYPES, Array, Strings
from conch.errors import internal, unsupported

#: What a caller may leave out, as there is one kind of token where nothing says otherwise.
_ZEROS = "token_type_ids"


class Feeds:
    """Made once for a graph; ``names`` are its inputs.  Raises UNSUPPORTED for an input that no array can be."""

    def __init__(self, inputs: Iterable[GraphTensor]) -> None:
        self._dtypes = {tensor.name: _dtype(tensor) for tensor in inputs}
        self.names = frozenset(self._dtypes)

    def of(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """What the graph takes of ``arrays``; INTERNAL when one is missing."""
        feeds = {}
        for name, dtype in self._dtypes.items():
            array = arrays.get(name)
            if array is None:
                if name != _ZEROS or "input_ids" not in arrays:
                    raise internal(
                        f"the graph takes '{name}', which the task does not give; it gives {', '.join(arrays)}"
                    )
                array = np.zeros(arrays["input_ids"].shape, dtype)
            feeds[name] = array if array.dtype == dtype else array.astype(dtype)
        return feeds


def _dtype(tensor: GraphTensor) -> np.dtype[np.generic]:
    if tensor.datatype not in DTYPES or tensor.datatype == "BF16":
        raise unsupported(f"the graph's input '{tensor.name}' is {tensor.datatype}, which tasks do not make")
    return DTYPES[tensor.datatype]


def widened(tensors: Sequence[GraphTensor], values: Sequence[Array | Strings]) -> dict[str, Array]:
    """The outputs of a graph by name, in FP32; those that are no numbers are left out."""
    return {
        tensor.name: _fp32(tensor, value)
        for tensor, value in zip(tensors, values, strict=True)
        if not isinstance(value, Strings)
    }


def _fp32(tensor: GraphTensor, value: Array) -> Array:
    if tensor.datatype == "BF16":  # the upper half of an FP32
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value if value.dtype == np.float32 else value.astype(np.float32)
