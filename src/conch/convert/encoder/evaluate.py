"""Runs a network on the samples (batches of token ids in, unpadded outputs out), and measures batch invariance.

Used in the process of ``conch convert``. Every network gets the same batches, made as in the server from texts of
similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines import NetworkEngine
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.encoder.agreement import SampleOutputs, compare
from conch.convert.sentences import TextSample
from conch.core.lengths import CPU_TOKENS
from conch.measure.texts.shapes import Shape

#: Batch sizes for comparing networks, used in turn, because errors may occur only in some shapes.
ROWS: Final = (8, 1, 3)

#: Outputs of one number per token.
_BY_TOKEN: Final = ("start_logits", "end_logits")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The rows of one run: sample indices, and arrays, INT64 ``[rows, tokens]``."""

    indices: tuple[int, ...]
    arrays: dict[str, Array]


def batches(
    encoder: InputEncoder, samples: Sequence[TextSample], rows: Sequence[int] = ROWS, *, budget: int = CPU_TOKENS
) -> list[TokenBatch]:
    """Batch the samples by length. Long texts are truncated regardless of the model's configuration."""
    tokens = tokenize(encoder, samples)
    groups = by_length([len(text.ids) for text in tokens], rows, budget=budget)
    return [TokenBatch(group, padded([tokens[index] for index in group], encoder.pad_id)) for group in groups]


def by_length(lengths: Sequence[int], rows: Sequence[int] = ROWS, *, budget: int = CPU_TOKENS) -> list[tuple[int, ...]]:
    """Return groups of the indices of texts of similar ``lengths``, of ``rows`` texts in turn.

    ``budget`` limits a group's tokens with padding, except for a group of one text.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    groups = []
    for count in cycle(rows):
        if not order:
            break
        while count > 1 and count * lengths[order[:count][-1]] > budget:
            count -= 1
        groups.append(tuple(order[:count]))
        del order[:count]
    return groups


def tokenize(encoder: InputEncoder, samples: Sequence[TextSample]) -> list[Tokens]:
    """Return the token ids of each sample, truncated to the model's maximum length."""
    pairs = [sample.pair for sample in samples if sample.pair is not None]
    tokens, _ = encoder.encode([sample.text for sample in samples], pairs or None)
    return tokens


def padded(tokens: Sequence[Tokens], pad_id: int) -> dict[str, Array]:
    """Return INT64 ``[texts, tokens]`` by input name, padded to the longest text."""
    shape = (len(tokens), max(len(text.ids) for text in tokens))
    ids, mask, types = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, text in enumerate(tokens):
        length = len(text.ids)
        ids[row, :length] = text.ids
        mask[row, :length] = 1
        if text.types is not None:
            types[row, :length] = text.types
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def arrays_of_shape(encoder: InputEncoder, samples: Sequence[TextSample], shape: Shape) -> dict[str, Array]:
    """Return arrays of exactly ``shape`` without padding, made from the samples' concatenated texts."""
    tokens = tokenize(encoder, [TextSample(f"{sample.text} {sample.pair or ''}") for sample in samples])
    ids = np.resize(np.concatenate([text.ids for text in tokens]), (shape.batch, shape.tokens))
    # Each row begins and ends with the special tokens of a text.
    ids[:, 0], ids[:, -1] = tokens[0].ids[0], tokens[0].ids[-1]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def divided(arrays: Mapping[str, Array], budget: int) -> list[dict[str, Array]]:
    """Divide ``[rows, tokens]`` arrays into runs of at most ``budget`` tokens, and of at least one row."""
    rows, tokens = arrays["input_ids"].shape
    count = max(1, budget // tokens)
    return [{name: array[start : start + count] for name, array in arrays.items()} for start in range(0, rows, count)]


def evaluate(
    engine: NetworkEngine,
    task: str,
    batches: Sequence[TokenBatch],
    *,
    mask_id: int | None = None,
    pad_id: int = 0,
    max_length: int = 0,
) -> list[SampleOutputs]:
    """Return the outputs of ``engine`` for each sample, in sample order.

    Batches are padded with ``pad_id`` to the engine's shapes, up to ``max_length`` tokens, as in the server.
    For fill-mask only the logits at ``mask_id`` are kept, because those of all positions would fill the memory.
    """
    by_index: dict[int, SampleOutputs] = {}
    for batch in batches:
        arrays = as_served(engine, batch.arrays, pad_id, max_length)
        outputs = engine.run(arrays)
        mask = arrays["attention_mask"]
        for row, index in enumerate(batch.indices):
            length = int(mask[row].sum())
            sample = {name: _unpadded(name, values[row], length) for name, values in outputs.items()}
            if task == "fill-mask" and mask_id is not None:
                sample = {"logits": _at_mask(sample["logits"], batch.arrays["input_ids"][row, :length], mask_id)}
            by_index[index] = sample
    return [by_index[index] for index in range(len(by_index))]


def as_served(engine: NetworkEngine, arrays: dict[str, Array], pad_id: int, max_length: int) -> dict[str, Array]:
    """Pad INT64 ``[rows, tokens]`` arrays to the shape that ``engine`` requires."""
    rows, tokens = arrays["attention_mask"].shape
    wanted_rows, wanted_tokens = engine.padded_shape(rows, tokens)
    around = ((0, wanted_rows - rows), (0, min(wanted_tokens, max(tokens, max_length)) - tokens))
    inputs = {
        name: np.pad(array, around, constant_values=pad_id if name == "input_ids" else 0)
        for name, array in arrays.items()
    }
    # A row without tokens would give NaN.
    inputs["attention_mask"][rows:, 0] = 1
    return inputs


def _unpadded(name: str, values: Array, length: int) -> Array:
    """Return one row of an output as ``[vectors, width]`` without padding."""
    if values.ndim == 2:
        return values[:length].copy()
    # Numbers per token form one vector over the tokens; numbers per text already are a vector.
    return values[None, :length].copy() if name in _BY_TOKEN else values[None].copy()


def _at_mask(logits: Array, ids: Array, mask_id: int) -> Array:
    positions = np.flatnonzero(ids == mask_id)
    position = int(positions[0]) if len(positions) else 0
    return logits[position : position + 1].copy()


# They should be equal except for rounding. If scales are computed at run time for whole activations (ONNX Runtime's
# dynamic quantization), a row with larger numbers makes the quantization of all rows coarser.


#: The number of rows in a batch with a mix of lengths, and the maximum number of rows to compare.
BATCH_ROWS: Final = 6
MAX_ROWS: Final = 24


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Comparison of the same rows alone and in batches of ``rows``.

    ``cosine_min`` is the smallest cosine of an output with itself (None if meaningless), ``argmax`` the share of logits
    with the same argmax (None without class logits), and ``samples`` the number of compared rows.
    """

    cosine_min: float | None
    argmax: float | None
    max_difference: float
    rows: int
    samples: int


def batches_of_strangers(
    encoder: InputEncoder, samples: Sequence[TextSample], *, budget: int = CPU_TOKENS
) -> list[TokenBatch]:
    """Return batches of texts of different lengths, from the shortest to the longest."""
    tokens = tokenize(encoder, samples)
    lengths = [len(text.ids) for text in tokens]
    groups = [[tokens[index] for index in group] for group in of_strangers(lengths, budget=budget)]
    batches, done = [], 0
    for group in groups:
        batches.append(TokenBatch(tuple(range(done, done + len(group))), padded(group, encoder.pad_id)))
        done += len(group)
    return batches


def of_strangers(lengths: Sequence[int], *, budget: int = CPU_TOKENS) -> list[list[int]]:
    """Return groups of the indices of texts of different ``lengths``, from the shortest to the longest.

    ``budget`` limits a group's tokens with padding. Texts that never share a run are omitted if others do.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    order = [index for index in order if 2 * lengths[index] <= budget] or order[:1]
    chosen = order[:: max(1, len(order) // MAX_ROWS)][:MAX_ROWS]
    count = max(1, len(chosen) // BATCH_ROWS)
    groups = [chosen[first::count] for first in range(count)]
    return [[*group[: budget // lengths[group[-1]] - 1], group[-1]] for group in groups]


def alone(batch: TokenBatch) -> list[TokenBatch]:
    """Return each row of a batch as its own batch, without padding."""
    rows = []
    for row, index in enumerate(batch.indices):
        length = int(batch.arrays["attention_mask"][row].sum())
        rows.append(TokenBatch((index,), {name: array[row : row + 1, :length] for name, array in batch.arrays.items()}))
    return rows


def neighbours(batches: Sequence[TokenBatch], run: Callable[[Sequence[TokenBatch]], list[SampleOutputs]]) -> Neighbours:
    """Compare the results of ``answer`` for the rows of ``batches`` alone and together."""
    by_itself = run([row for batch in batches for row in alone(batch)])
    return apart(by_itself, run(batches), rows=max(len(batch.indices) for batch in batches))


def apart(first: Sequence[SampleOutputs], second: Sequence[SampleOutputs], rows: int = 1) -> Neighbours:
    """Compare two outputs for the same rows, which were in batches of ``rows``."""
    figures = compare(first, second)
    cosines = [figure.cosine_min for figure in figures.values() if figure.cosine_min is not None]
    shares = [figure.argmax for figure in figures.values() if figure.argmax is not None]
    return Neighbours(
        min(cosines, default=None),
        min(shares, default=None),
        max(figure.max_difference for figure in figures.values()),
        rows,
        len(first),
    )


def widest(results: Sequence[Neighbours]) -> Neighbours:
    """Return the worst of each figure."""
    cosines = [result.cosine_min for result in results if result.cosine_min is not None]
    shares = [result.argmax for result in results if result.argmax is not None]
    return Neighbours(
        min(cosines, default=None),
        min(shares, default=None),
        max(result.max_difference for result in results),
        max(result.rows for result in results),
        min(result.samples for result in results),
    )


def greatest(outputs: Sequence[SampleOutputs]) -> float:
    """Return the largest absolute value of all outputs."""
    return max((float(np.abs(values).max()) for output in outputs for values in output.values()), default=0.0)
