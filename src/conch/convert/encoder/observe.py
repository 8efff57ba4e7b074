"""What a network says about the samples: texts to batches of token ids, and outputs without their padding.

Used by ``conch convert`` in its process.  Every network gets the same batches, made as the server makes them:
texts of similar length together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.encoder.agreement import Observation
from conch.convert.measure import Shape
from conch.convert.sentences import TextSample

#: Rows of the batches that networks are compared on, in turn: what is wrong may be so in some shapes only.
ROWS: Final = (8, 1, 3)

#: Outputs of one number a token.
_BY_TOKEN: Final = ("start_logits", "end_logits")

#: FP32 ``[rows, tokens, hidden]`` and INT64 ``[rows, tokens]`` (1 where real) to ``[rows, width]``.
Pool = Callable[[Array, Array], Array]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of one run: which samples they are, and the arrays, INT64 ``[rows, tokens]``."""

    indices: tuple[int, ...]
    arrays: dict[str, Array]


def batches(encoder: InputEncoder, samples: Sequence[TextSample], rows: Sequence[int] = ROWS) -> list[TokenBatch]:
    """The samples by length.  Texts that are too long are cut, whatever the model's configuration says."""
    tokens = encode(encoder, samples)
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index].ids))
    groups = []
    for count in cycle(rows):
        if not order:
            break
        groups.append(tuple(order[:count]))
        del order[:count]
    return [TokenBatch(group, padded([tokens[index] for index in group], encoder.pad_id)) for group in groups]


def encode(encoder: InputEncoder, samples: Sequence[TextSample]) -> list[Tokens]:
    """The token ids of each sample."""
    pairs = [sample.pair for sample in samples if sample.pair is not None]
    tokens, _ = encoder.encode([sample.text for sample in samples], pairs or None)
    return tokens


def padded(tokens: Sequence[Tokens], pad: int, length: int = 0) -> dict[str, Array]:
    """Rows of one length, that of the longest or ``length``."""
    length = max(length, *(len(one.ids) for one in tokens))
    shape = (len(tokens), length)
    ids, mask, types = np.full(shape, pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(tokens):
        ids[row, : len(one.ids)] = one.ids
        mask[row, : len(one.ids)] = 1
        if one.types is not None:
            types[row, : len(one.ids)] = one.types
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def of_shape(encoder: InputEncoder, samples: Sequence[TextSample], shape: Shape) -> dict[str, Array]:
    """Arrays of exactly ``shape`` without padding: the samples' texts one after another, cut into rows."""
    plain = [TextSample(f"{sample.text} {sample.pair or ''}") for sample in samples]
    tokens = encode(encoder, plain)
    stream = np.concatenate([one.ids for one in tokens])
    ids = np.resize(stream, (shape.batch, shape.tokens))
    # Each row begins and ends as texts do.
    first, last = tokens[0].ids[0], tokens[0].ids[-1]
    ids[:, 0] = first
    ids[:, -1] = last
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def observe(
    engine: NetworkEngine,
    task: str,
    batches: Sequence[TokenBatch],
    *,
    pool: Pool | None = None,
    mask_id: int | None = None,
    pad: int = 0,
    most: int = 0,
) -> list[Observation]:
    """What ``engine`` says about each sample, in the samples' order.

    Batches are padded with ``pad`` to the shapes that the engine wants, up to ``most`` tokens, as the server does it.
    ``pool`` makes the sentence embeddings of feature-extraction; for fill-mask only the logits at ``mask_id`` stay,
    since those of all places would fill the memory.
    """
    found: dict[int, Observation] = {}
    for batch in batches:
        arrays = as_served(engine, batch.arrays, pad, most)
        outputs = engine.run(arrays)
        mask = arrays["attention_mask"]
        extra = {"embedding": pool(outputs["last_hidden_state"], mask)} if pool is not None else {}
        for row, index in enumerate(batch.indices):
            length = int(mask[row].sum())
            one = {name: _real(name, values[row], length) for name, values in {**outputs, **extra}.items()}
            if task == "fill-mask" and mask_id is not None:
                one = {"logits": _at_mask(one["logits"], batch.arrays["input_ids"][row, :length], mask_id)}
            found[index] = one
    return [found[index] for index in range(len(found))]


def as_served(engine: NetworkEngine, arrays: dict[str, Array], pad: int, most: int) -> dict[str, Array]:
    """INT64 ``[rows, tokens]`` arrays in the shape that ``engine`` wants for them."""
    rows, tokens = arrays["attention_mask"].shape
    wanted_rows, wanted_tokens = engine.padded_shape(rows, tokens)
    around = ((0, wanted_rows - rows), (0, min(wanted_tokens, max(tokens, most)) - tokens))
    made = {
        name: np.pad(array, around, constant_values=pad if name == "input_ids" else 0) for name, array in arrays.items()
    }
    made["attention_mask"][rows:, 0] = 1
    return made


def _real(name: str, values: Array, length: int) -> Array:
    """One row of an output as ``[vectors, width]`` without what stands at padding."""
    if values.ndim == 2:
        return values[:length].copy()
    # A number a token is one vector over the tokens; numbers a text are one as they are.
    return values[None, :length].copy() if name in _BY_TOKEN else values[None].copy()


def _at_mask(logits: Array, ids: Array, mask_id: int) -> Array:
    places = np.flatnonzero(ids == mask_id)
    place = int(places[0]) if len(places) else 0
    return logits[place : place + 1].copy()


def arrays_of(batches: Sequence[TokenBatch]) -> Iterator[Mapping[str, Array]]:
    """The batches as calibration wants them."""
    return (batch.arrays for batch in batches)
