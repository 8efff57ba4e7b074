"""What a few examples tell of a network before it serves: whether it has its weights, and which rows may share a run.

Some networks have no mask, or one that leaks: what they say of a text changes with the padding behind it.  Others
refuse several rows.  Which do is found out, as no file says it.  Called when a task is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import Tokens

#: A text, and one so much longer that the first is mostly padding beside it.
SHORT: Final = "Where is the nearest library?"
LONG: Final = (
    "A program takes a list of numbers and returns the even ones, 2 and 4 of 1 to 5, while the bus to the station is "
    "late and nobody knows why it is open in the morning."
)
#: How far the numbers of a row may move with its neighbours, as a part of the greatest: rounding.
_ROUNDING: Final[Mapping[str, float]] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
#: The same for graphs in INT8, whose scales may be those of the whole batch.
_COARSE: Final = 0.25
#: How much more than its neighbours padding must move a row before it is to blame.
_MORE: Final = 4.0


class Sharing(Enum):
    """Which sequences may share a run: any, padded; those of one length; none."""

    PADDED = "padded"
    EQUAL = "equal lengths"
    ALONE = "alone"


def examine(engine: NetworkEngine, encoder: InputEncoder, *, pair: bool) -> Sharing:
    """Find out which rows may share a run of ``engine`` so that each gets the answer that it gets alone.

    ``pair``: a sequence is made of two texts.  Raises INVALID_ARG if the answers depend on weights that are missing.
    """
    [short] = _encoded(encoder, SHORT, encoder.max_length, pair=pair)
    alone = PaddedBatch([short], (), encoder.pad_id)
    engine.require_tensors(alone.arrays(engine.inputs))
    wanted = _first(engine.run(alone.arrays(engine.inputs)))
    [long] = _encoded(encoder, LONG, encoder.max_length, pair=pair)
    [other] = _encoded(encoder, LONG, len(short.ids), pair=pair)
    bound = _ROUNDING.get(engine.precision, _COARSE)
    beside = _moved(engine, encoder, wanted, [short, other])
    if beside > bound:
        return Sharing.ALONE
    if len(long.ids) > len(short.ids) and _moved(engine, encoder, wanted, [long, short]) > max(bound, _MORE * beside):
        return Sharing.EQUAL
    return Sharing.PADDED


def _encoded(encoder: InputEncoder, text: str, limit: int, *, pair: bool) -> list[Tokens]:
    tokenizer, types = encoder.tokenizer, encoder.types
    if pair:
        return list(tokenizer.encode_pairs([text], [text], limit, types=types))
    return list(tokenizer.encode_texts([text], limit, types=types))


def _moved(
    engine: NetworkEngine, encoder: InputEncoder, wanted: Mapping[str, Array], sequences: Sequence[Tokens]
) -> float:
    """How far the outputs of the shortest of two sequences are from ``wanted``, which it has alone; 1 is all the way.

    Infinite where both cannot run at once.
    """
    batch = PaddedBatch(sequences, (), encoder.pad_id)
    row = min(range(2), key=lambda index: len(sequences[index].ids))
    try:
        found = engine.run(batch.arrays(engine.inputs))
        return max(_distance(wanted[name], array[row]) for name, array in found.items())
    except Exception:  # whatever a network raises that takes one row at a time, or one length
        return float("inf")


def _first(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array[0] for name, array in outputs.items()}


def _distance(wanted: Array, found: Array) -> float:
    """The greatest difference as a part of the greatest number, over what both have; ``found`` may have padding."""
    if found.shape != wanted.shape:
        found = found[: len(wanted)]
    size = float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.where(wanted == found, 0, np.abs(wanted - found))
    furthest = float(apart.max(initial=0))
    return furthest / max(size, 1e-6) if np.isfinite(furthest) else float("inf")
