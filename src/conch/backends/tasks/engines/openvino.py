"""The engine ``openvino``: an exported graph in OpenVINO, on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from conch.backends.graphs.openvino.compiled import CompiledGraph, CompileSettings
from conch.backends.tasks.engines.graph import GraphEngine
from conch.core.lengths import on_grid
from conch.machine.cores import usable_cores

#: The number of requests for a shape after which it is not padded, and the maximum number of shapes that are counted.
WORTH_COMPILING: Final = 32
MOST_SHAPES: Final = 512


class OpenVinoEngine(GraphEngine):
    """A graph for ``instances`` concurrent threads that share ``threads`` cores (0: all usable cores).

    ``precision`` is that of the arithmetic (see :class:`CompileSettings`). In OpenVINO, the first run of a new shape
    takes 15 ms, or up to 40 ms with several sequences; later runs take 2 ms. ``padded_shape`` therefore rounds to a
    small set of shapes, except for shapes that are requested often. Raises the errors of :class:`CompiledGraph`.
    """

    name = "openvino"

    def __init__(
        self,
        path: Path,
        *,
        precision: str = "fp32",
        threads: int = 0,
        instances: int = 1,
    ) -> None:
        settings = CompileSettings(threads=threads or usable_cores(), instances=instances, precision=precision)
        super().__init__(CompiledGraph(path, settings), precision)
        self._requested: Counter[tuple[int, int]] = Counter()

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        exact = (rows, length)
        rounded = on_grid(rows, length)
        if exact == rounded or self._requested[exact] >= WORTH_COMPILING:
            return exact
        if len(self._requested) < MOST_SHAPES or exact in self._requested:
            self._requested[exact] += 1
        return rounded
