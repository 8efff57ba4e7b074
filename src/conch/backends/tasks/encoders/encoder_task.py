"""The base class of encoder tasks: tokenises requests on arrival and runs sequences of similar length together.

The thread that receives a request calls ``prepare``; the threads of the instances call ``execute``. At load, the
network runs example texts, which shows missing weights and the rows that may share a run. In some networks padding
changes the outputs, because they ignore the attention mask or apply it incompletely. Others fail on several rows. No
file of a checkpoint specifies this, so it is measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from time import monotonic_ns
from typing import Any, ClassVar, Final

import numpy as np

from conch.backends.base.arrays import UNFINISHED, Array, Request, Result, failure
from conch.backends.base.verification import difference, require_likeness, rounding, unlike
from conch.backends.tasks.classification import FUNCTION, FUNCTIONS, checked_choice
from conch.backends.tasks.engines import NetworkEngine
from conch.backends.tasks.task import ExecutionWork, OpenEngine, PreparedRequest, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.inputs import InputEncoder, open_encoder
from conch.checkpoints.tokenizers.open import TYPES, original_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens
from conch.core.errors import ConchError, cancelled, invalid, one_line
from conch.core.inference import TensorSpec
from conch.core.lengths import CPU_TOKENS, GPU_TOKENS, equal_runs, runs
from conch.core.text_parameters import REFUSE, TRUNCATION


class PaddedBatch:
    """The sequences of one engine run and their requests, as INT64 ``ids`` and ``mask``.

    Both arrays are ``[rows, length]``: ``shape`` if given, else the number of sequences and the longest length.
    ``padded`` is true if any position is padding, or is not attended to.
    """

    __slots__ = ("ids", "mask", "padded", "requests", "sequences")

    def __init__(
        self,
        sequences: Sequence[Tokens],
        requests: Sequence[Any],
        pad: int,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """Pad at the end with the token ``pad``; the first sequence must be the longest."""
        self.sequences = sequences
        self.requests = requests
        count = len(sequences)
        rows, length = shape or (count, len(sequences[0].ids))
        flat = np.concatenate([sequence.ids for sequence in sequences]) if count > 1 else sequences[0].ids
        masks = [sequence.mask for sequence in sequences]
        self.padded = len(flat) != rows * length or any(mask is not None for mask in masks)
        if not self.padded:
            self.ids = flat.reshape(rows, length)
            self.mask = np.ones((rows, length), np.int64)
            return
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        real = np.zeros((rows, length), np.bool_)
        real[:count] = np.arange(length) < lengths[:, None]
        self.ids = np.full((rows, length), pad, np.int64)
        self.ids[real] = flat
        self.mask = real.astype(np.int64)
        for row, mask in enumerate(masks):
            if mask is not None:
                self.mask[row, : len(mask)] = mask
        self.mask[count:, 0] = 1  # avoids a division by zero in rows without tokens

    def without_padding_rows(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``outputs`` without the rows that are only padding; removes these rows from ``mask`` too."""
        count = len(self.sequences)
        self.mask = self.mask[:count]
        return {name: array[:count] for name, array in outputs.items()}

    def arrays(self, names: Collection[str], *, types: bool) -> dict[str, Array]:
        """Return the network's inputs; ``names`` are the input names of the network.

        ``types`` is true if the tokenizer produces token types. Without them ``token_type_ids`` is omitted, because
        zeros are not the default of every network.
        """
        arrays = {"input_ids": self.ids, "attention_mask": self.mask}
        if types and TYPES in names:
            arrays[TYPES] = self.types()
        if "position_ids" in names:
            arrays["position_ids"] = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape).copy()
        return arrays

    def types(self) -> Array:
        """Return INT64 ``token_type_ids``, 0 for padding."""
        types = np.zeros_like(self.ids)
        for row, sequence in enumerate(self.sequences):
            if sequence.types is not None:
                types[row, : len(sequence.types)] = sequence.types
        return types

    def rows(self, array: Array) -> list[Array]:
        """Return each sequence's part of ``[n, length, …]``, without padding."""
        return [array[row, : len(sequence.ids)] for row, sequence in enumerate(self.sequences)]


#: Two example texts. In a batch with the long text, the row of the short text is mostly padding.
SHORT: Final = "Where is the nearest library?"
LONG: Final = (
    "A program takes a list of numbers and returns the even ones, 2 and 4 of 1 to 5, while the bus to the station is "
    "late and nobody knows why it is open in the morning."
)
#: Padding counts as harmful if it changes a row by more than this many times the effect of a second row.
_MORE: Final = 4.0


class Sharing(Enum):
    """Which sequences may share a run: all (with padding), those of equal length, or none."""

    PADDED = "padded"
    EQUAL = "equal lengths"
    ALONE = "alone"


def strictest(sharings: Sequence[Sharing]) -> Sharing:
    """Return the strictest result of several engines."""
    return max(sharings, key=list(Sharing).index)


class Examples:
    """Example texts (or pairs of a text with itself) for ``engine``, encoded by ``encoder``."""

    def __init__(self, engine: NetworkEngine, encoder: InputEncoder, *, pair: bool) -> None:
        self._engine = engine
        self._encoder = encoder
        self._pair = pair
        self._bound = rounding(engine.precision)
        # Half of the maximum length at most, so that the long text pads the short one.
        special = encoder.tokenizer.special_token_count(pair=pair)
        self._limit = min(encoder.max_length, max(encoder.max_length // 2, special + 1 + pair))
        self._short = self._encoded(SHORT, self._limit)

    def require_tensors(self) -> None:
        """Raise INVALID_ARG, naming the weights, if outputs depend on missing weights."""
        self._engine.require_tensors(self._arrays([self._short]))

    def sharing(self) -> Sharing:
        """Determine which rows may share a run without changing their outputs."""
        alone = self._alone
        long, other = self._encoded(LONG, self._encoder.max_length), self._encoded(LONG, len(self._short.ids))
        beside = self._moved(alone, [self._short, other])
        if beside > self._bound:
            return Sharing.ALONE
        if len(long.ids) > len(self._short.ids):
            padded = self._moved(alone, [long, self._short])
            if padded > max(self._bound, _MORE * beside):
                return Sharing.EQUAL
        return Sharing.PADDED

    def require_likeness(self, tokenizer: Any) -> None:
        """Raise INVALID_ARG if tokens or outputs differ from transformers; ``tokenizer`` is that of transformers."""
        texts = [SHORT, SHORT] if self._pair else [SHORT]
        encoding = tokenizer(*texts, truncation=True, max_length=self._limit)
        ids = self._short.ids.tolist()
        if list(encoding["input_ids"]) != ids:
            raise unlike(f"'{SHORT}' is {encoding['input_ids']} to its tokenizer, and {ids} by tokenizer.json")
        arrays = {name: np.array([values]) for name, values in encoding.items()}
        outputs, expected = self._alone, self._engine.reference(arrays)
        require_likeness(outputs, expected, self._engine.precision, f"for '{SHORT}'")

    def _encoded(self, text: str, limit: int) -> Tokens:
        tokenizer, types = self._encoder.tokenizer, self._encoder.types
        if self._pair:
            return next(iter(tokenizer.encode_pairs([text], [text], limit, types=types)))
        return next(iter(tokenizer.encode_texts([text], limit, types=types)))

    def _arrays(self, sequences: Sequence[Tokens]) -> dict[str, Array]:
        batch = PaddedBatch(sequences, (), self._encoder.pad_id)
        return batch.arrays(self._engine.inputs, types=self._encoder.types)

    @cached_property
    def _alone(self) -> dict[str, Array]:
        try:
            return self._run([self._short])
        except Exception as error:
            raise invalid(f"the network fails on '{SHORT}': {one_line(error)}") from error

    def _run(self, sequences: Sequence[Tokens]) -> dict[str, Array]:
        return self._engine.run(self._arrays(sequences))

    def _moved(self, alone: Mapping[str, Array], sequences: Sequence[Tokens]) -> float:
        """Return the :func:`difference` of the output of the short text if two ``sequences`` share a run.

        Infinite if the two cannot run together.
        """
        row = next(index for index, sequence in enumerate(sequences) if sequence is self._short)
        try:
            outputs = self._run(sequences)
            precision = self._engine.precision
            return max(difference(alone[name][0], array[row], precision) for name, array in outputs.items())
        except Exception:  # networks that accept only one row or one length raise many types
            return float("inf")


TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
PAIR: Final = TensorSpec("text_pair", "BYTES", (1,))


class EncodedRequest(PreparedRequest):
    """A request as token sequences, in the order of its rows.

    ``truncated`` is the number of truncated rows; ``state`` is data that the task keeps for ``extract`` and
    ``assemble``. ``values`` has the value of each sequence, None until it is known.
    """

    __slots__ = ("sequences", "state", "truncated", "values")

    def __init__(self, request: Request, sequences: list[Tokens], truncated: int = 0, state: Any = None) -> None:
        super().__init__(request, max([len(sequence.ids) for sequence in sequences], default=0), len(sequences))
        self.sequences = sequences
        self.truncated = truncated
        self.state = state
        self.values: list[Any] = [None] * len(sequences)

    @property
    def token_counts(self) -> list[int]:
        lengths = [sequence.count for sequence in self.sequences]
        per_row = len(lengths) // self.request.rows
        return [sum(lengths[start : start + per_row]) for start in range(0, len(lengths), per_row)]


class EncoderNetwork(ABC):
    """A network that reads token ids, with its tokenizer.

    A subclass encodes a request as sequences (``prepare``), extracts a value per sequence from the outputs of a run
    (``extract``), and builds the result of a request from these values (``assemble``).
    """

    #: Whether each sequence is a pair of texts.
    pair: ClassVar[bool] = False

    def __init__(self, checkpoint: Checkpoint, engine: NetworkEngine) -> None:
        self.checkpoint = checkpoint
        self.options = checkpoint.options
        self.engine = engine
        original = original_tokenizer(checkpoint) if self.engine.name == "torch" else None
        self.encoder = open_encoder(checkpoint, original)
        self.budget = checkpoint.options.max_batch_tokens or (CPU_TOKENS if self.engine.device == "cpu" else GPU_TOKENS)
        sharings = []
        for engine in self.engine.parts:
            examples = Examples(engine, self.encoder, pair=self.pair)
            examples.require_tensors()
            if checkpoint.options.verify_on_load and original is not None:
                examples.require_likeness(original)
            sharings.append(examples.sharing())
        self.sharing = strictest(sharings)

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.encoder.tokenizer

    @property
    def limits(self) -> dict[str, int | str]:
        limits: dict[str, int | str] = {"max_batch_tokens": self.budget, "max_length": self.encoder.max_length}
        if self.encoder.refuse:
            limits[TRUNCATION] = REFUSE
        return limits if self.sharing is Sharing.PADDED else {**limits, "batches": self.sharing.value}

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
        values = [value for request in encoded for value in request.values]
        left = [index for index, value in enumerate(values) if value is None]
        spent = 0
        before = monotonic_ns()
        for run in self.divide([sequences[index] for index in left]):
            indices = [left[index] for index in run]
            padded = self.pad([sequences[index] for index in indices], [requests[index] for index in indices])
            if all(request.request.cancelled for request in padded.requests):
                continue
            if spent and spent + padded.ids.size > self.budget and work.others_wait():
                break
            spent += padded.ids.size
            arrays = padded.arrays(self.engine.inputs, types=self.encoder.types)
            arranged = monotonic_ns()
            outputs = self.compute(arrays, padded, work)
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
            results.append(completed(request, values[start:end], self.assemble))
            start = end
        work.answer_ns += monotonic_ns() - before
        return results

    def divide(self, sequences: Sequence[Tokens]) -> list[list[int]]:
        """Return the indices of the sequences of each run, the longest first."""
        lengths = [len(sequence.ids) for sequence in sequences]
        if self.sharing is Sharing.PADDED:
            return runs(lengths, budget=self.budget)
        return equal_runs(lengths, budget=self.budget, limit=1 if self.sharing is Sharing.ALONE else 0)

    def compute(self, arrays: dict[str, Array], batch: PaddedBatch, work: ExecutionWork) -> dict[str, Array]:
        """Run the network on ``arrays``, the inputs of ``batch``; other runs are counted in ``work``."""
        return self.engine.run(arrays)

    def pad(self, sequences: Sequence[Tokens], requests: Sequence[EncodedRequest]) -> PaddedBatch:
        """Return the batch of a run; the first sequence must be the longest."""
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


class EncoderTask(EncoderNetwork, Task):
    """A task that is completed by one pass of one network."""

    #: The class of transformers that loads the network with the task's head.
    head: ClassVar[str]
    #: The outputs of the network that ``extract`` reads.
    reads: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        self.describe(checkpoint)  # rejects invalid options before weights are read
        engine = open_engine(self.choose_head(checkpoint))
        engine.require_outputs(self.reads, checkpoint.source)
        super().__init__(checkpoint, engine)

    @classmethod
    def choose_head(cls, checkpoint: Checkpoint) -> str:
        """``head``, unless the architecture of ``checkpoint`` needs another class."""
        return cls.head

    @abstractmethod
    def prepare(self, request: Request) -> EncodedRequest: ...

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
        return None if value is None else checked_choice(FUNCTION, value, FUNCTIONS)


def completed(
    encoded: EncodedRequest, values: list[Any], assemble: Callable[[EncodedRequest, list[Any]], Result]
) -> Result | ConchError:
    """Build the result of a request from the ``values`` of its sequences; returns an error instead of raising it.

    If values are missing (None), returns ``UNFINISHED``, and the request keeps the available values.
    """
    if encoded.request.cancelled:
        return cancelled("the request was cancelled")
    encoded.values = values
    if any(value is None for value in values):
        return UNFINISHED
    try:
        result = assemble(encoded, values)
    except Exception as error:
        return failure(error)
    if encoded.truncated:
        result.parameters["truncated"] = encoded.truncated
    return result


def stacked(rows: Sequence[Array]) -> Array:
    """Stack arrays of equal shape as rows; a single array is not copied."""
    return rows[0][None] if len(rows) == 1 else np.array(rows)


def texts_of(request: Request, name: str) -> list[str]:
    """Return one text per row. Raises INVALID_ARG if the number of texts differs from the number of rows."""
    texts = request.texts(name)
    if len(texts) != request.rows:
        raise invalid(f"input '{name}' has {len(texts)} texts for {request.rows} rows; it takes one for each row")
    return texts
