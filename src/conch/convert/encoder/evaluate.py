"""Runs a network on the samples as the server does, and measures batch invariance.

Used in the process of ``conch convert``. Every variant gets the same batches, of texts of similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.encoders.encoder_task import PaddedBatch
from conch.backends.tasks.engines import NetworkEngine
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.open import TYPES
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.encoder.agreement import SampleOutputs, compare
from conch.convert.sentences import TextSample
from conch.core.lengths import CPU_TOKENS
from conch.measure.texts.shapes import Shape

#: Batch sizes for comparing networks, used in turn, because errors may occur only in some shapes.
ROWS: Final = (8, 1, 3)

#: Outputs of one number per token.
_BY_TOKEN: Final = ("start_logits", "end_logits")


def by_length(lengths: Sequence[int], *, budget: int = CPU_TOKENS) -> list[tuple[int, ...]]:
    """Return groups of the indices of texts of similar ``lengths``, of ``ROWS`` texts in turn.

    ``budget`` limits a group's tokens with padding, except for a group of one text.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    groups = []
    for count in cycle(ROWS):
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


def calibration_arrays(sequences: Sequence[Tokens], pad_id: int) -> list[Mapping[str, Array]]:
    """Return each sequence as INT64 ``[1, tokens]`` by input name, for calibrating the ranges of activations."""
    return [PaddedBatch([tokens], (), pad_id).arrays((TYPES,), types=True) for tokens in sequences]


def ids_of_shape(encoder: InputEncoder, samples: Sequence[TextSample], shape: Shape) -> Array:
    """Return INT64 token ids of exactly ``shape`` without padding, made from the samples' concatenated texts."""
    tokens, _ = encoder.encode([f"{sample.text} {sample.pair or ''}" for sample in samples])
    ids = np.resize(np.concatenate([text.ids for text in tokens]), (shape.batch, shape.tokens))
    # Each row begins and ends with the special tokens of a text.
    ids[:, 0], ids[:, -1] = tokens[0].ids[0], tokens[0].ids[-1]
    return ids


def divided(arrays: Mapping[str, Array], budget: int) -> list[dict[str, Array]]:
    """Divide ``[rows, tokens]`` arrays into runs of at most ``budget`` tokens, and of at least one row."""
    rows, tokens = arrays["input_ids"].shape
    count = max(1, budget // tokens)
    return [{name: array[start : start + count] for name, array in arrays.items()} for start in range(0, rows, count)]


def run_together(
    engine: NetworkEngine, encoder: InputEncoder, sequences: Sequence[Tokens], task: str
) -> list[SampleOutputs]:
    """Run the sequences as one batch, padded as in the server; return the outputs of each without padding.

    For fill-mask only the logits at the mask are kept, because those of all positions would fill the memory.
    """
    longest = max(len(tokens.ids) for tokens in sequences)
    rows, length = engine.padded_shape(len(sequences), longest)
    shape = rows, min(length, max(longest, encoder.max_length))
    batch = PaddedBatch(sequences, (), encoder.pad_id, shape)
    outputs = engine.run(batch.arrays(engine.inputs, types=encoder.types))
    samples: list[SampleOutputs] = []
    for row, tokens in enumerate(sequences):
        sample: SampleOutputs = {
            name: _unpadded(name, values[row], len(tokens.ids)) for name, values in outputs.items()
        }
        if task == "fill-mask":
            position = int((tokens.ids == encoder.tokenizer.special.mask_id).argmax())
            sample = {"logits": sample["logits"][position : position + 1].copy()}
        samples.append(sample)
    return samples


def _unpadded(name: str, values: Array, length: int) -> Array:
    """Return one row of an output as ``[vectors, width]`` without padding."""
    if values.ndim == 2:
        return values[:length].copy()
    # Numbers per token form one vector over the tokens; numbers per text already are a vector.
    return values[None, :length].copy() if name in _BY_TOKEN else values[None].copy()


#: The number of rows in a batch with a mix of lengths, and the maximum number of rows to compare.
BATCH_ROWS: Final = 6
MAX_ROWS: Final = 24


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Comparison of the same rows alone and in batches of ``rows``.

    They should be equal except for rounding. If scales are computed at run time for whole activations (ONNX Runtime's
    dynamic quantization), a row with larger numbers makes the quantization of all rows coarser.

    ``cosine_min`` is the smallest cosine of an output with itself (None if meaningless), ``argmax`` the share of logits
    with the same argmax (None without class logits), and ``samples`` the number of compared rows.
    """

    cosine_min: float | None
    argmax: float | None
    max_difference: float
    rows: int
    samples: int


@dataclass(frozen=True, slots=True)
class EncoderOutputs:
    """The network's outputs for each sample, in sample order, and their dependence on the other rows of a batch."""

    outputs: list[SampleOutputs]
    neighbours: Neighbours


def run_samples(
    lengths: Sequence[int], run: Callable[[Sequence[int]], list[SampleOutputs]], *, budget: int = CPU_TOKENS
) -> EncoderOutputs:
    """Run samples of ``lengths`` tokens in batches of at most ``budget`` tokens, and some also alone.

    ``run`` computes the samples with the given indices together, and returns the outputs of each.
    """
    by_index: dict[int, SampleOutputs] = {}
    for group in by_length(lengths, budget=budget):
        by_index |= zip(group, run(group), strict=True)
    groups = of_strangers(lengths, budget=budget)
    alone = [output for group in groups for index in group for output in run([index])]
    together = [output for group in groups for output in run(group)]
    outputs = [by_index[index] for index in range(len(lengths))]
    return EncoderOutputs(outputs, apart(alone, together, max(map(len, groups))))


def of_strangers(lengths: Sequence[int], *, budget: int = CPU_TOKENS) -> list[list[int]]:
    """Return groups of the indices of texts of different ``lengths``, from the shortest to the longest.

    ``budget`` limits a group's tokens with padding. Texts that never share a run are omitted if others do.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    order = [index for index in order if 2 * lengths[index] <= budget] or order[:1]
    chosen = order[:: max(1, len(order) // MAX_ROWS)][:MAX_ROWS]
    count = max(1, len(chosen) // BATCH_ROWS)
    groups = [chosen[first::count] for first in range(count)]
    return [[*group[:-1][: budget // lengths[group[-1]] - 1], group[-1]] for group in groups]


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
