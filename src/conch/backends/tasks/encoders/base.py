"""What all tasks over an encoder share: tokenise on arrival, compute in runs by length, finish per request.

``prepare`` is called by the thread that received a request, ``execute`` by the threads of the instances.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from conch.backends.native.arrays import Array, Request, Result, failure
from conch.backends.tasks.base import ExecutionWork, OpenEngine, Prepared, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.encode import Tokens, open_encoder
from conch.errors import ConchError, cancelled, invalid
from conch.inference import TensorSpec
from conch.lengths import CPU_TOKENS, GPU_TOKENS, runs

TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
PAIR: Final = TensorSpec("text_pair", "BYTES", (1,))


class Encoded(Prepared):
    """A request as sequences: ``items`` row by row, ``cut`` rows shortened, ``state`` whatever its task needs later."""

    __slots__ = ("cut", "items", "state")

    def __init__(self, request: Request, items: list[Tokens], cut: int = 0, state: Any = None) -> None:
        super().__init__(request, max([len(item.ids) for item in items], default=0), len(items))
        self.items = items
        self.cut = cut
        self.state = state


class Run:
    """What a run of the engine computes: sequences, their requests, and INT64 ``ids`` and ``mask`` ``[rows, length]``.

    ``rows`` and ``length`` are ``shape``, or that of the sequences where they need no padding.
    """

    __slots__ = ("ids", "items", "mask", "owners", "padded")

    def __init__(
        self, items: Sequence[Tokens], owners: Sequence[Encoded], pad: int, shape: tuple[int, int] | None = None
    ) -> None:
        """Pad at the end with ``pad``; the first of ``items`` is the longest."""
        self.items = items
        self.owners = owners
        rows, length = shape or (len(items), len(items[0].ids))
        flat = np.concatenate([item.ids for item in items]) if len(items) > 1 else items[0].ids
        self.padded = len(flat) != rows * length
        if not self.padded:
            self.ids = flat.reshape(rows, length)
            self.mask = np.ones((rows, length), np.int64)
            return
        lengths = np.array([len(item.ids) for item in items])
        real = np.zeros((rows, length), np.bool_)
        real[: len(items)] = np.arange(length) < lengths[:, None]
        self.ids = np.full((rows, length), pad, np.int64)
        self.ids[real] = flat
        self.mask = real.astype(np.int64)
        self.mask[len(items) :, 0] = 1  # a row without any token would be divided by the sum of nothing

    def of_items(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Forget rows that are only padding."""
        count = len(self.items)
        self.mask = self.mask[:count]
        return {name: array[:count] for name, array in outputs.items()}

    def types(self) -> Array:
        """INT64 ``token_type_ids``, 0 for padding."""
        types = np.zeros_like(self.ids)
        for row, item in enumerate(self.items):
            if item.types is not None:
                types[row, : len(item.types)] = item.types
        return types

    def rows(self, array: Array) -> list[Array]:
        """Each sequence's part of ``[n, length, …]``, without padding."""
        return [array[row, : len(item.ids)] for row, item in enumerate(self.items)]


class EncoderTask(Task):
    """A task whose network reads token ids.  Subclasses say how rows become sequences, and results."""

    #: The class of transformers that has the task's head.
    head: ClassVar[str]

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        self.describe(checkpoint, options)
        self.checkpoint = checkpoint
        self.options = options
        self.encoder = open_encoder(checkpoint, options)
        self.engine = open_engine(self.head_of(checkpoint))
        self.budget = options.max_batch_tokens or (CPU_TOKENS if self.engine.device == "cpu" else GPU_TOKENS)

    @classmethod
    def head_of(cls, checkpoint: Checkpoint) -> str:
        return cls.head

    @abstractmethod
    def prepare(self, request: Request) -> Encoded: ...

    @abstractmethod
    def reduce(self, outputs: Mapping[str, Array], run: Run) -> Iterable[Any]:
        """What ``finish`` needs of each sequence of a run; small, since a request may have any number of them."""

    @abstractmethod
    def finish(self, prepared: Encoded, values: list[Any]) -> Result:
        """A request's result from what ``reduce`` made of its sequences, in their order."""

    def execute(self, batch: Sequence[Prepared], usage: ExecutionWork) -> list[Result | ConchError]:
        requests: Sequence[Encoded] = batch  # type: ignore[assignment]
        items = [item for request in requests for item in request.items]
        owners = [request for request in requests for _ in request.items]
        values: list[Any] = [None] * len(items)
        for indices in runs([len(item.ids) for item in items], budget=self.budget):
            run = self._run([items[index] for index in indices], [owners[index] for index in indices])
            if all(owner.request.cancelled for owner in run.owners):
                continue
            for index, value in zip(indices, self.reduce(self._compute(run, usage), run), strict=True):
                values[index] = value
        results: list[Result | ConchError] = []
        start = 0
        for request in requests:
            end = start + len(request.items)
            results.append(self._finish(request, values[start:end]))
            start = end
        return results

    def _run(self, items: Sequence[Tokens], owners: Sequence[Encoded]) -> Run:
        longest = len(items[0].ids)
        rows, length = self.engine.padded_shape(len(items), longest)
        # Beyond the maximum a network may have no positions.
        return Run(items, owners, self.encoder.pad_id, (rows, min(length, max(longest, self.encoder.max_length))))

    def _compute(self, run: Run, usage: ExecutionWork) -> dict[str, Array]:
        wanted = self.engine.inputs
        arrays = {"input_ids": run.ids, "attention_mask": run.mask}
        if "token_type_ids" in wanted:
            arrays["token_type_ids"] = run.types()
        if "position_ids" in wanted:
            arrays["position_ids"] = np.broadcast_to(np.arange(run.ids.shape[1]), run.ids.shape).copy()
        outputs = self.engine.run(arrays)
        usage.add(sum([len(item.ids) for item in run.items]), run.ids.size, len(run.items))
        return outputs if len(run.ids) == len(run.items) else run.of_items(outputs)

    def _finish(self, request: Encoded, values: list[Any]) -> Result | ConchError:
        if request.request.cancelled:
            return cancelled("the request was cancelled")
        try:
            result = self.finish(request, values)
        except Exception as error:
            return failure(error)
        if request.cut:
            result.parameters["truncated"] = request.cut
        return result

    def option(self, request: Request, name: str, default: Any = None) -> Any:
        """A task option: the request's, else the configuration's parameter of that name, else ``default``."""
        if name in request.inputs:
            return request.option(name)
        return self.options.extra.get(name, default)


def together(rows: Sequence[Array]) -> Array:
    """Arrays of one shape as the rows of one; a single one is not copied."""
    return rows[0][None] if len(rows) == 1 else np.stack(rows)


def texts_of(request: Request, name: str) -> list[str]:
    """One text per row; INVALID_ARG when the input has another number of them."""
    texts = request.texts(name)
    if len(texts) != request.rows:
        raise invalid(f"input '{name}' has {len(texts)} texts for {request.rows} rows; it takes one for each row")
    return texts
