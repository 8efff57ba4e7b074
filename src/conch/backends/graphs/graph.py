"""The interface of loaded graphs, independent of the library, and the base classes of backends that serve a file.

Used in workers by the backends ``onnxruntime``, ``openvino`` and ``pytorch``, and by the engines of the first two.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from conch.backends.base.arrays import Array, Strings
from conch.backends.base.backend_base import TensorBackend
from conch.backends.graphs import signature
from conch.backends.graphs.signature import GraphTensor, SequenceTensors
from conch.core.errors import ConchError, unavailable


class ModelFile(Protocol):
    """The tensors that a model's file describes, in its order; ``inputs`` and ``outputs`` may be empty."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


class Graph(ABC):
    """A graph that several threads may run concurrently; ``inputs`` and ``outputs`` have the order of the graph.

    ``initializers`` are constants that a request may override.
    """

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    initializers: tuple[GraphTensor, ...] = ()

    @abstractmethod
    def infer(self, names: Sequence[str], values: Mapping[str, Array | Strings]) -> list[Array | Strings]:
        """Run once and return the outputs ``names``; supports all datatypes: BF16 as 16-bit values, BYTES as UTF-8."""


@contextmanager
def errors_name_target(path: Path) -> Iterator[None]:
    """Replace ``path`` and its folder in errors by those of its target, if it is an absolute link.

    ``conch serve FILE`` links the file into a temporary folder, which users do not know.
    """
    try:
        yield
    except ConchError as error:
        target = path.readlink() if path.is_symlink() else path
        if target == path or not target.is_absolute() or str(path.parent) not in error.message:
            raise
        message = error.message.replace(str(path), str(target)).replace(str(path.parent), str(target.parent))
        raise ConchError(message, error.code) from None


class ModelFileBackend(TensorBackend):
    """A backend that serves a file in the version directory and completes the configuration from it."""

    @abstractmethod
    def model_file(self) -> Path:
        """Return the expected path of the file."""

    @abstractmethod
    def inspect(self, path: Path) -> ModelFile:
        """Open the file only to read its tensors. Raises INVALID_ARG if it does not describe them."""

    def complete(self) -> str:
        """Fill in batch size, tensors and scheduler from the file, unless the configuration has inputs and outputs."""
        if self.config.get("input") and self.config.get("output"):
            name = self.model["name"]
            self.log(
                "INFO", f"skipping model configuration auto-complete for '{name}': inputs and outputs already specified"
            )
            return json.dumps(self.config)
        batch_size = signature.default_max_batch_size(self.backend_config)
        path = self.existing_file()
        with errors_name_target(path):
            file = self.inspect(path)
        tensors = SequenceTensors.of(self.config).of_clients(file.inputs, file.outputs)
        completed = signature.complete(self.config, *tensors, batch_size, lambda text: self.log("WARNING", text))
        return json.dumps(completed)

    def existing_file(self) -> Path:
        """Return the path of the file. Raises UNAVAILABLE if it does not exist."""
        path = self.model_file()
        if not path.exists():
            raise unavailable(f"unable to find '{path}' for model '{self.model['name']}'")
        return path


class GraphBackend(ModelFileBackend):
    """One graph on one device; its instances are threads that share it."""

    _graph: Graph

    @abstractmethod
    def open(self, path: Path, instance: Mapping[str, Any]) -> Graph:
        """Open the graph to run it. Raises INVALID_ARG for invalid parameters."""

    def load(self, instance: Mapping[str, Any]) -> None:
        path = self.existing_file()
        with errors_name_target(path):
            graph = self.open(path, instance)
        sequences = SequenceTensors.of(self.config)
        sequences.check(self.model["name"], graph.inputs, graph.outputs)
        inputs, outputs = sequences.of_clients(graph.inputs, graph.outputs)
        signature.check(self.config, inputs, outputs, graph.initializers)
        self._graph = graph

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        names = [tensor.name for tensor in self._graph.outputs if tensor.name in outputs]
        return dict(zip(names, self._graph.infer(names, arrays), strict=True))
