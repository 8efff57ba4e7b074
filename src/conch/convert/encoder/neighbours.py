"""Measures batch invariance: compares the outputs for the same texts alone and in batches with others.

They should be equal except for rounding.  If scales are computed at run time for whole activations (ONNX Runtime's
dynamic quantization), a row with larger numbers makes the quantization of all rows coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.convert.encoder.agreement import OutputAgreement, SampleOutputs, compare
from conch.convert.encoder.evaluate import TokenBatch, padded, tokenize
from conch.convert.sentences import TextSample

#: The number of rows in a batch with a mix of lengths, and the maximum number of rows to compare.
ROWS: Final = 6
MAX_ROWS: Final = 24

#: Intermediate outputs, from which the task's outputs are computed.
PARTS: Final = ("last_hidden_state",)


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


def batches_of_strangers(encoder: InputEncoder, samples: Sequence[TextSample]) -> list[TokenBatch]:
    """Return batches of texts of different lengths, from the shortest to the longest."""
    tokens = tokenize(encoder, samples)
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index].ids))
    step = max(1, len(order) // MAX_ROWS)
    chosen = order[::step][:MAX_ROWS]
    count = max(1, len(chosen) // ROWS)
    groups = [[tokens[index] for index in chosen[first::count]] for first in range(count)]
    batches, done = [], 0
    for group in groups:
        batches.append(TokenBatch(tuple(range(done, done + len(group))), padded(group, encoder.pad_id)))
        done += len(group)
    return batches


def alone(batch: TokenBatch) -> list[TokenBatch]:
    """Return each row of a batch as its own batch, without padding."""
    rows = []
    for row, index in enumerate(batch.indices):
        length = int(batch.arrays["attention_mask"][row].sum())
        rows.append(TokenBatch((index,), {name: array[row : row + 1, :length] for name, array in batch.arrays.items()}))
    return rows


def neighbours(
    batches: Sequence[TokenBatch], answer: Callable[[Sequence[TokenBatch]], list[SampleOutputs]]
) -> Neighbours:
    """Compare the results of ``answer`` for the rows of ``batches`` alone and together."""
    by_itself = answer([row for batch in batches for row in alone(batch)])
    return apart(by_itself, answer(batches), rows=max(len(batch.indices) for batch in batches))


def apart(first: Sequence[SampleOutputs], second: Sequence[SampleOutputs], rows: int = 1) -> Neighbours:
    """Compare two outputs for the same rows, which were in batches of ``rows``."""
    figures = _answers(compare(first, second))
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
    return max(
        (float(np.abs(output[name]).max()) for output in outputs for name in output if name not in PARTS), default=0.0
    )


def _answers(figures: Mapping[str, OutputAgreement]) -> Mapping[str, OutputAgreement]:
    return {name: figure for name, figure in figures.items() if name not in PARTS} or figures
