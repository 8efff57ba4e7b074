"""How much a row's answer depends on the other rows of its batch: the same texts alone, and among others.

It should not, but for rounding.  With scales that are found at run time for the whole of an activation (ONNX Runtime's
dynamic quantisation) a neighbour with larger numbers makes those of all rows coarser.
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

#: Rows of a batch, of all lengths that there are, and the most rows that are compared.
ROWS: Final = 6
MAX_ROWS: Final = 24

#: The outputs that are not what the task answers with, but what is made of them.
PARTS: Final = ("last_hidden_state",)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The same rows alone and in batches of ``rows``: the smallest cosine of an answer with itself (None where that
    says nothing), the share of logits whose largest is at the same place (None without logits of classes), and how many
    rows were compared."""

    cosine_min: float | None
    argmax: float | None
    max_difference: float
    rows: int
    samples: int


def batches_of_strangers(encoder: InputEncoder, samples: Sequence[TextSample]) -> list[TokenBatch]:
    """Batches of texts of different lengths, the shortest beside the longest."""
    tokens = tokenize(encoder, samples)
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index].ids))
    step = max(1, len(order) // MAX_ROWS)
    chosen = order[::step][:MAX_ROWS]
    count = max(1, len(chosen) // ROWS)
    groups = [[tokens[index] for index in chosen[first::count]] for first in range(count)]
    made, done = [], 0
    for group in groups:
        made.append(TokenBatch(tuple(range(done, done + len(group))), padded(group, encoder.pad_id)))
        done += len(group)
    return made


def alone(batch: TokenBatch) -> list[TokenBatch]:
    """Each row of a batch as a batch of its own, without padding."""
    rows = []
    for row, index in enumerate(batch.indices):
        length = int(batch.arrays["attention_mask"][row].sum())
        rows.append(TokenBatch((index,), {name: array[row : row + 1, :length] for name, array in batch.arrays.items()}))
    return rows


def neighbours(
    batches: Sequence[TokenBatch], answer: Callable[[Sequence[TokenBatch]], list[SampleOutputs]]
) -> Neighbours:
    """Compare what ``answer`` gives for the rows of ``batches`` alone and together."""
    by_itself = answer([row for batch in batches for row in alone(batch)])
    return apart(by_itself, answer(batches), rows=max(len(batch.indices) for batch in batches))


def apart(first: Sequence[SampleOutputs], second: Sequence[SampleOutputs], rows: int = 1) -> Neighbours:
    """How far the answers to the same rows are apart, which were in batches of ``rows``."""
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


def widest(found: Sequence[Neighbours]) -> Neighbours:
    """The worst of each figure."""
    cosines = [one.cosine_min for one in found if one.cosine_min is not None]
    shares = [one.argmax for one in found if one.argmax is not None]
    return Neighbours(
        min(cosines, default=None),
        min(shares, default=None),
        max(one.max_difference for one in found),
        max(one.rows for one in found),
        min(one.samples for one in found),
    )


def greatest(outputs: Sequence[SampleOutputs]) -> float:
    """The largest number of all answers, without its sign."""
    return max(
        (float(np.abs(output[name]).max()) for output in outputs for name in output if name not in PARTS), default=0.0
    )


def _answers(figures: Mapping[str, OutputAgreement]) -> Mapping[str, OutputAgreement]:
    return {name: figure for name, figure in figures.items() if name not in PARTS} or figures
