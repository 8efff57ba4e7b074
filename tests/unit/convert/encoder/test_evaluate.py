"""Texts to batches, and outputs without their padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines import NetworkEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.inputs import InputEncoder, open_encoder
from conch.convert.encoder.evaluate import (
    by_length,
    calibration_arrays,
    ids_of_shape,
    of_strangers,
    run_together,
    tokenize,
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

    inputs = frozenset({"input_ids", "attention_mask", "token_type_ids"})

    def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
        ids = arrays["input_ids"].astype(np.float32)
        return {
            "last_hidden_state": np.stack([ids, ids], -1),
            "start_logits": ids,
            "logits": np.zeros((len(ids), ids.shape[1]), np.float32),
        }


def test_batches_have_every_text_once_by_length_and_at_most_the_tokens_of_a_run() -> None:
    lengths = [600, 8, 300, 8, 4096, 500]

    assert by_length(lengths, budget=1024) == [(1, 3, 2), (5,), (0,), (4,)]
    assert by_length([5] * 13) == [(0, 1, 2, 3, 4, 5, 6, 7), (8,), (9, 10, 11), (12,)]
    assert of_strangers(sorted(lengths), budget=1024) == [[0, 3]]
    assert of_strangers([4096, 5000], budget=1024) == [[0]]


def test_calibration_has_single_texts_without_padding_but_with_their_types_and_masks(encoder: InputEncoder) -> None:
    (pair,) = tokenize(encoder, [TextSample("Hello", "station")])
    (single,) = tokenize(encoder, [TextSample("station")])
    single.mask = np.arange(len(single.ids)) % 2

    first, second = calibration_arrays([pair, single], encoder.pad_id)

    assert first["input_ids"].tolist() == [pair.ids.tolist()] and first["attention_mask"].all()
    assert set(first["token_type_ids"][0]) == {0, 1}
    assert second["attention_mask"].tolist() == [single.mask.tolist()] and not second["token_type_ids"].any()


def test_long_texts_are_truncated(encoder: InputEncoder) -> None:
    (tokens,) = tokenize(encoder, [TextSample("station " * 99)])

    assert len(tokens.ids) == 40


def test_outputs_have_the_order_of_the_sequences_and_no_padding(encoder: InputEncoder) -> None:
    sequences = tokenize(encoder, SAMPLES)

    outputs = run_together(Echo(), encoder, sequences, "any")

    longest = max(len(tokens.ids) for tokens in sequences)
    for tokens, sample in zip(sequences, outputs, strict=True):
        assert sample["last_hidden_state"][:, 0].tolist() == tokens.ids.tolist()
        assert sample["start_logits"].tolist() == [tokens.ids.tolist()]
        # Numbers per text are kept whole, even as many as there are tokens.
        assert sample["logits"].shape == (1, longest)


def test_fill_mask_keeps_the_words_at_the_mask(encoder: InputEncoder) -> None:
    class Words(Echo):
        def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
            return {"logits": super().run(arrays)["last_hidden_state"]}

    sequences = tokenize(encoder, [TextSample("a [MASK] station"), TextSample("[MASK]")])

    samples = run_together(Words(), encoder, sequences, "fill-mask")

    mask = [[encoder.tokenizer.special.mask_id] * 2]
    assert [sample["logits"].tolist() for sample in samples] == [mask, mask]


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(3, 16), Shape(32, 40)])
def test_measured_inputs_are_text_of_exactly_that_shape(encoder: InputEncoder, shape: Shape) -> None:
    ids = ids_of_shape(encoder, SAMPLES, shape)

    assert ids.shape == (shape.batch, shape.tokens)
    assert (ids[:, 0] == encoder.tokenizer.special.cls_id).all()
    assert len(np.unique(ids)) >= min(shape.tokens, 10)


def test_batches_have_the_shapes_that_the_server_gives_an_engine(encoder: InputEncoder) -> None:
    class Coarse(Echo):
        def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
            return 4, 64

        def run(self, arrays: Mapping[str, Array], names: Collection[str] = ()) -> dict[str, Array]:
            self.arrays = arrays
            return super().run(arrays)

    engine = Coarse()
    outputs = run_together(engine, encoder, encoder.encode(["Hello!", "I walk to the market."])[0], "any")

    # The server gives no more than the maximum length of the network.
    assert {array.shape for array in engine.arrays.values()} == {(4, 40)} and len(outputs) == 2
    assert engine.arrays["attention_mask"].sum(axis=1).tolist()[2:] == [1, 1]
    assert (engine.arrays["input_ids"][engine.arrays["attention_mask"] == 0] == encoder.pad_id).all()
