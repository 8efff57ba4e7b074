"""Texts to batches, and outputs without their padding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines import NetworkEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import InputEncoder, open_encoder
from conch.convert.encoder.evaluate import (
    arrays_of_shape,
    as_served,
    batches,
    by_length,
    evaluate,
    of_strangers,
    padded,
)
from conch.convert.sentences import TextSample
from conch.measure.texts.shapes import Shape
from tests.text_checkpoints import TEXTS, wordpiece

SAMPLES = [TextSample(text) for text in TEXTS]


@pytest.fixture
def encoder(tmp_path: Path) -> InputEncoder:
    wordpiece(tmp_path)
    checkpoint = Checkpoint(tmp_path, "tiny", "", {"type_vocab_size": 2}, Options(), max_length=40)
    return open_encoder(checkpoint)


class Echo(NetworkEngine):
    """Gives each token's id back, in the form of several heads."""

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        ids = arrays["input_ids"].astype(np.float32)
        return {
            "last_hidden_state": np.stack([ids, ids], -1),
            "start_logits": ids,
            "logits": np.zeros((len(ids), ids.shape[1]), np.float32),
        }


def test_batches_hold_every_sample_once_by_length(encoder: InputEncoder) -> None:
    made = batches(encoder, SAMPLES, rows=(2,))

    assert sorted(index for batch in made for index in batch.indices) == list(range(len(SAMPLES)))
    assert [batch.arrays["input_ids"].shape[0] for batch in made] == [2, 2, 1]
    lengths = [batch.arrays["attention_mask"].sum(1).max() for batch in made]
    assert lengths == sorted(lengths)
    for batch in made:
        ids, mask = batch.arrays["input_ids"], batch.arrays["attention_mask"]
        assert (ids[mask == 0] == encoder.pad_id).all() and mask[:, 0].all()


def test_batches_have_at_most_the_tokens_of_a_run() -> None:
    lengths = [8, 8, 300, 500, 600, 4096]

    assert by_length(lengths, budget=1024) == [(0, 1, 2), (3,), (4,), (5,)]
    assert of_strangers(lengths, budget=1024) == [[0, 3]]
    assert of_strangers([4096, 5000], budget=1024) == [[0]]


def test_batches_of_one_are_without_padding(encoder: InputEncoder) -> None:
    made = batches(encoder, SAMPLES, rows=(1,))

    assert all((batch.arrays["attention_mask"] == 1).all() for batch in made)
    assert sorted(batch.arrays["input_ids"].shape[1] for batch in made) == sorted(
        len(tokens.ids) for tokens in encoder.encode(TEXTS)[0]
    )


def test_long_texts_are_cut(encoder: InputEncoder) -> None:
    (batch,) = batches(encoder, [TextSample("station " * 99)])

    assert batch.arrays["input_ids"].shape == (1, 40)


def test_pairs_have_types(encoder: InputEncoder) -> None:
    (batch,) = batches(encoder, [TextSample("Hello", "station")])

    assert set(batch.arrays["token_type_ids"][0]) == {0, 1}


def test_outputs_come_in_the_order_of_the_samples_and_without_padding(encoder: InputEncoder) -> None:
    made = batches(encoder, SAMPLES, rows=(3,))

    found = evaluate(Echo(), "any", made)

    for sample, one in zip(SAMPLES, found, strict=True):
        (alone,) = batches(encoder, [sample])
        ids = alone.arrays["input_ids"][0]
        assert one["last_hidden_state"][:, 0].tolist() == ids.tolist()
        assert one["start_logits"].tolist() == [ids.tolist()]


def test_numbers_a_text_are_kept_whole_though_there_are_as_many_as_tokens(encoder: InputEncoder) -> None:
    made = batches(encoder, SAMPLES, rows=(3,))

    widths = {one["logits"].shape for one in evaluate(Echo(), "any", made)}

    assert widths == {(1, batch.arrays["input_ids"].shape[1]) for batch in made}


def test_fill_mask_keeps_the_words_at_the_mask(encoder: InputEncoder) -> None:
    class Words(Echo):
        def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {"logits": super().run(arrays)["last_hidden_state"]}

    assert encoder.tokenizer.special.mask_id is not None
    made = batches(encoder, [TextSample("a [MASK] station"), TextSample("[MASK]")])

    for one in evaluate(Words(), "fill-mask", made, mask_id=encoder.tokenizer.special.mask_id):
        assert one["logits"].tolist() == [[encoder.tokenizer.special.mask_id] * 2]


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(3, 16), Shape(32, 40)])
def test_measured_inputs_are_text_of_exactly_that_shape(encoder: InputEncoder, shape: Shape) -> None:
    arrays = arrays_of_shape(encoder, SAMPLES, shape)

    assert {array.shape for array in arrays.values()} == {(shape.batch, shape.tokens)}
    assert arrays["attention_mask"].all()
    assert (arrays["input_ids"][:, 0] == encoder.tokenizer.special.cls_id).all()
    assert len(np.unique(arrays["input_ids"])) >= min(shape.tokens, 10)


def test_batches_have_the_shapes_that_the_server_gives_an_engine(encoder: InputEncoder) -> None:
    class Coarse(Echo):
        def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
            return 4, 16

    arrays = padded(encoder.encode(["Hello!", "I walk to the market."])[0], encoder.pad_id)
    made = as_served(Coarse(), arrays, encoder.pad_id, 15)
    assert made["input_ids"].shape == (4, 15)
    assert made["attention_mask"].sum(axis=1).tolist()[2:] == [1, 1]
    assert (made["input_ids"][made["attention_mask"] == 0] == encoder.pad_id).all()
