"""A loaded graph, whatever library runs it, and the backend that serves one: tensors in, tensors out.

Used in workers by the backends ``onnxruntime`` and ``openvino``, and by the engines of the same names.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.backends.base.arrays import Array, Strings
from conch.backends.base.backend import TensorBackend
from conch.backends.graphs import signature
from conch.backends.graphs.sequence_tensors import SequenceTensors
from conch.backends.graphs.signature import GraphTensor
from conch.errors import unavailable


class Graph(ABC):
    """A graph that several threads may run at once; ``inputs`` and ``outputs`` are in its own order.

    ``initializers`` are constants for which a caller may give other values.
    """

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    initializers: tuple[GraphTensor, ...] = ()

    @abstractmethod
    def infer(self, names: Sequence[str], values: Mapping[str, Array | Strings]) -> list[Array | Strings]:
        """Run once, for the outputs ``names``, with tensors of any type: BF16 as its 16 bits, BYTES as UTF-8."""


class GraphBackend(TensorBackend):
    """One graph on one device; its instances are threads over it."""

    _graph: Graph

    @abstractmethod
    def model_file(self) -> Path:
        """Where the version directory should have the graph's file."""

    @abstractmethod
    def inspect(self, path: Path) -> Graph:
        """The graph, opened only to see its tensors."""

    @abstractmethod
    def open(self, path: Path, instance: Mapping[str, Any]) -> Graph:
        """The graph, ready to run.  Raises INVALID_ARG for parameters that make no sense."""

    def complete(self) -> str:
        """The batch size, tensors and scheduler from the graph, unless inputs and outputs are given."""
        if self.config.get("input") and self.config.get("output"):
            name = self.model["name"]
            self.log(
                "INFO", f"skipping model configuration auto-complete for '{name}': inputs and outputs already specified"
            )
            return json.dumps(self.config)
        batch_size = signature.default_max_batch_size(self.backend_config)
        graph = self.inspect(self._path())
        inputs, outputs = SequenceTensors.of(self.config).of_clients(graph.inputs, graph.outputs)
        completed = signature.complete(self.config, inputs, outputs, batch_size, lambda text: self.log("WARNING", text))
        return json.dumps(completed)

    def load(self, instance: Mapping[str, Any]) -> None:
        graph = self.open(self._path(), instance)
        sequences = SequenceTensors.of(self.config)
        sequences.check(self.model["name"], graph.inputs, graph.outputs)
        inputs, outputs = sequences.of_clients(graph.inputs, graph.outputs)
        signature.check(self.config, inputs, outputs, graph.initializers)
        self._graph = graph

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        names = [tensor.name for tensor in self._graph.outputs if tensor.name in outputs]
        return dict(zip(names, self._graph.infer(names, arrays), strict=True))

    def _path(self) -> Path:
        path = self.model_file()
        if not path.exists():
            raise unavailable(f"unable to find '{path}' for model '{self.model['name']}'")
        return path
