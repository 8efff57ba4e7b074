"""The base class of encoder tasks: tokenises requests on arrival and runs sequences of similar length together.

The thread that receives a request calls ``prepare``; the threads of the instances call ``execute``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, ClassVar, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, failure
from conch.backends.tasks.base import ExecutionWork, OpenEngine, PreparedRequest, Task
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.encoders.trial import Examples, Sharing, strictest
from conch.backends.tasks.scores import FUNCTION, checked_function
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.checkpoints.tokenizers.open import original_tokenizer
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.core.errors import ConchError, cancelled, invalid
from conch.core.inference import TensorSpec
from conch.core.lengths import CPU_TOKENS, GPU_TOKENS, equal_runs, runs

TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
PAIR: Final = TensorSpec("text_pair", "BYTES", (1,))


class EncodedRequest(PreparedRequest):
    """A request as token sequences, in the order of its rows.

    ``truncated`` is the number of truncated rows; ``state`` is data that the task keeps for ``extract`` and
    ``assemble``.
    """

    __slots__ = ("sequences", "state", "truncated")

    def __init__(self, request: Request, sequences: list[Tokens], truncated: int = 0, state: Any = None) -> None:
        super().__init__(request, max([len(sequence.ids) for sequence in sequences], default=0), len(sequences))
        self.sequences = sequences
        self.truncated = truncated
        self.state = state


class EncoderTask(Task):
    """A task whose network reads token ids.

    A subclass encodes a request as sequences (``prepare``), extracts a value per sequence from the outputs of a run
    (``extract``), and builds the result of a request from these values (``assemble``).
    """

    #: The class of transformers that loads the network with the task's head.
    head: ClassVar[str]
    #: The outputs of the network that ``extract`` reads.
    reads: ClassVar[tuple[str, ...]] = ("logits",)
    #: Whether each sequence is a pair of texts.
    pair: ClassVar[bool] = False

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        self.describe(checkpoint, options)  # rejects invalid options before weights are read
        self.checkpoint = checkpoint
        self.options = options
        self.engine = open_engine(self.choose_head(checkpoint))
        self.engine.require_outputs(self.reads, checkpoint.source)
        original = original_tokenizer(checkpoint) if self.engine.name == "torch" else None
        self.encoder = open_encoder(checkpoint, options, original)
        self.budget = options.max_batch_tokens or (CPU_TOKENS if self.engine.device == "cpu" else GPU_TOKENS)
        sharings = []
        for engine in self.engine.parts:
            examples = Examples(engine, self.encoder, pair=self.pair)
            examples.require_tensors()
            if options.verify_on_load and original is not None:
                examples.require_likeness(original)
            sharings.append(examples.sharing())
        self.sharing = strictest(sharings)

    @property
    def limits(self) -> dict[str, int | str]:
        limits: dict[str, int | str] = {"max_batch_tokens": self.budget, "max_length": self.encoder.max_length}
        return limits if self.sharing is Sharing.PADDED else {**limits, "batches": self.sharing.value}

    @classmethod
    def choose_head(cls, checkpoint: Checkpoint) -> str:
        """``head``, unless the architecture of ``checkpoint`` needs another class."""
        return cls.head

    @abstractmethod
    def prepare(self, request: Request) -> EncodedRequest: ...

    @abstractmethod
    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        """Extract the values for ``assemble``, one per sequence of a run.

        The values should be small, because a request may have any number of sequences.
        """

    @abstractmethod
    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        """Build the result of a request from the values of its sequences, in order."""

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        encoded: Sequence[EncodedRequest] = batch  # type: ignore[assignment]
        sequences = [sequence for request in encoded for sequence in request.sequences]
        requests = [request for request in encoded for _ in request.sequences]
        values: list[Any] = [None] * len(sequences)
        before = monotonic_ns()
        for indices in self._divided([len(sequence.ids) for sequence in sequences]):
            padded = self._pad([sequences[index] for index in indices], [requests[index] for index in indices])
            if all(request.request.cancelled for request in padded.requests):
                continue
            arrays = padded.arrays(self.engine.inputs, types=self.encoder.types)
            arranged = monotonic_ns()
            outputs = self.engine.run(arrays)
            computed = monotonic_ns()
            for index, value in zip(indices, self.extract(self._outputs(outputs, padded, work), padded), strict=True):
                values[index] = value
            work.arrange_ns += arranged - before
            work.engine_ns += computed - arranged
            before = monotonic_ns()
            work.answer_ns += before - computed
        results: list[Result | ConchError] = []
        start = 0
        for request in encoded:
            end = start + len(request.sequences)
            results.append(self._result(request, values[start:end]))
            start = end
        work.answer_ns += monotonic_ns() - before
        return results

    def _divided(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the sequences of each run, the longest first."""
        if self.sharing is Sharing.PADDED:
            return runs(lengths, budget=self.budget)
        return equal_runs(lengths, budget=self.budget, limit=1 if self.sharing is Sharing.ALONE else 0)

    def _pad(self, sequences: Sequence[Tokens], requests: Sequence[EncodedRequest]) -> PaddedBatch:
        if self.sharing is not Sharing.PADDED:
            return PaddedBatch(sequences, requests, self.encoder.pad_id)
        longest = len(sequences[0].ids)
        rows, length = self.engine.padded_shape(len(sequences), longest)
        # The network may have no positions beyond the maximum length.
        shape = rows, min(length, max(longest, self.encoder.max_length))
        return PaddedBatch(sequences, requests, self.encoder.pad_id, shape)

    def _outputs(self, outputs: dict[str, Array], batch: PaddedBatch, work: ExecutionWork) -> dict[str, Array]:
        """Count the run and return ``outputs`` without padding rows, ``[sequences, …]`` by name."""
        count = len(batch.sequences)
        work.add(sum([len(sequence.ids) for sequence in batch.sequences]), batch.ids.size, count)
        return outputs if len(batch.ids) == count else batch.without_padding_rows(outputs)

    def _result(self, encoded: EncodedRequest, values: list[Any]) -> Result | ConchError:
        if encoded.request.cancelled:
            return cancelled("the request was cancelled")
        try:
            result = self.assemble(encoded, values)
        except Exception as error:
            return failure(error)
        if encoded.truncated:
            result.parameters["truncated"] = encoded.truncated
        return result

    def option(self, request: Request, name: str, default: Any = None) -> Any:
        """Return the request's input ``name``, else the model parameter of that name, else ``default``."""
        if name in request.inputs:
            return request.option(name)
        return self.options.extra.get(name, default)

    def flag(self, request: Request, name: str) -> bool:
        """Return the boolean input ``name`` of the request, else the model parameter of that name, else False."""
        return bool(request.option(name)) if name in request.inputs else self.options.flag(name)

    def function(self, request: Request) -> str | None:
        """Return ``function_to_apply`` of the request, else of the model's parameters, else None.

        Raises INVALID_ARG for an unknown function.
        """
        value = self.option(request, FUNCTION)
        return None if value is None else checked_function(value)


def stacked(rows: Sequence[Array]) -> Array:
    """Stack arrays of equal shape as rows; a single array is not copied."""
    return rows[0][None] if len(rows) == 1 else np.stack(rows)


def texts_of(request: Request, name: str) -> list[str]:
    """Return one text per row. Raises INVALID_ARG if the number of texts differs from the number of rows."""
    texts = request.texts(name)
    if len(texts) != request.rows:
        raise invalid(f"input '{name}' has {len(texts)} texts for {request.rows} rows; it takes one for each row")
    return texts
