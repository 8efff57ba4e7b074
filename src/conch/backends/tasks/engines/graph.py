"""An engine for exported graphs: casts the arrays of a task to the graph's types, and outputs to FP32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conch.backends.base.arrays import DTYPES, Array, Strings
from conch.backends.graphs.graph import Graph
from conch.backends.graphs.signature import GraphTensor
from conch.backends.tasks.engines.base import NetworkEngine
from conch.core.errors import internal, unsupported

#: The only input that a task may omit; all tokens then have type 0.
_ZEROS = "token_type_ids"


class GraphEngine(NetworkEngine):
    """Runs ``graph``, which computes in ``precision``, on ``device``.

    Raises UNSUPPORTED for a graph with an input type that has no numpy type.
    """

    def __init__(self, graph: Graph, precision: str, device: str = "cpu") -> None:
        self._graph = graph
        self._dtypes = {tensor.name: _dtype(tensor) for tensor in graph.inputs}
        self.inputs = frozenset(self._dtypes)
        self.outputs = tuple(tensor.name for tensor in graph.outputs)
        self.precision = precision
        self.device = device

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        values = self._graph.infer(self.outputs, self._feeds(arrays))
        return {
            tensor.name: _fp32(tensor, value)
            for tensor, value in zip(self._graph.outputs, values, strict=True)
            if not isinstance(value, Strings)
        }

    def _feeds(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the graph's inputs from ``arrays``, cast to its types. Raises INTERNAL if an input is missing."""
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


def _fp32(tensor: GraphTensor, value: Array) -> Array:
    if tensor.datatype == "BF16":  # the upper half of an FP32
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value if value.dtype == np.float32 else value.astype(np.float32)
