"""The engine ``openvino``: an exported graph in OpenVINO, on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from conch.backends.base.threads import usable_cores
from conch.backends.graphs.openvino.compiled import CompiledGraph, CompileSettings
from conch.backends.tasks.engines.graph import GraphEngine
from conch.lengths import on_grid

#: How often a shape is asked for before it is compiled for itself, and how many shapes are counted.
WORTH_COMPILING: Final = 32
MOST_SHAPES: Final = 512


class OpenVinoEngine(GraphEngine):
    """A graph that ``instances`` threads may run at once, on ``threads`` cores together (0: the usable ones).

    ``precision`` says what the arithmetic is done in (see :class:`CompileSettings`).  OpenVINO takes 15 ms, up to 40
    with several sequences, for the first run with a shape that is new to it, when the run itself takes 2; so
    ``padded_shape`` rounds to few shapes, except for those that are requested again and again.  Raises what
    :class:`CompiledGraph` raises.
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
