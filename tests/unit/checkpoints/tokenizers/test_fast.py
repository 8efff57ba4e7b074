"""What a tokenizer of ``tokenizers`` spares itself: pieces that are cut off, and texts that it has seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Encoding, Tokenizer
from transformers import AutoTokenizer

from conch.checkpoints.tokenizers.fast import FastTokenizer
from tests.text_checkpoints import TEXTS, write
from tests.unit.checkpoints.tokenizers.encoders import LONG, opened


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_cut_off_a_text_is_kept_in_few_pieces(folder: Path, side: str) -> None:
    encoder = opened(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.side = side
    counted = Counted(encoder.tokenizer.fast)
    encoder.tokenizer.fast = counted  # type: ignore[assignment]
    encoder.tokenizer.reread()
    long = "station bus " * 400
    [item], _ = encoder.encode([long], [long])
    # Many pieces of each would become their product when the two are combined.
    assert counted.pieces and max(counted.pieces) < 5
    expected = AutoTokenizer.from_pretrained(folder, truncation_side=side)(long, long, truncation=True)
    assert item.ids.tolist() == expected["input_ids"]


def test_a_text_of_many_pairs_is_tokenised_once(folder: Path) -> None:
    encoder, reference = opened(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    counted = Counted(encoder.tokenizer.fast)
    encoder.tokenizer.fast = counted  # type: ignore[assignment]
    encoder.tokenizer.reread()
    labels = ["bus", "an open market", "library", "bus"]
    for truncation in ("first", "longest"):
        counted.texts.clear()
        items, cut = encoder.encode([LONG] * 4, labels, truncation=truncation, per_row=4)  # type: ignore[arg-type]
        assert sorted(counted.texts) == sorted({LONG, *labels}) and cut == 1
        expected = reference([LONG] * 4, labels, truncation="only_first" if truncation == "first" else True)
        assert [item.ids.tolist() for item in items] == expected["input_ids"]


class Counted:
    """A tokenizer that remembers what it was given; texts are encoded as a whole, not by their words."""

    model = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []
        self.pieces: list[int] = []

    def encode_batch_fast(self, texts: list[str], **settings: bool) -> object:
        self.texts += texts
        return self.tokenizer.encode_batch_fast(texts, **settings)

    def post_process(self, first: Encoding, second: Encoding | None, *settings: bool) -> Encoding:
        if second is not None:
            self.pieces += [len(first.overflowing), len(second.overflowing)]
        return self.tokenizer.post_process(first, second, *settings)

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)


def test_pairs_without_special_tokens_have_types(tmp_path: Path) -> None:
    encoder = opened(write(tmp_path, "AutoModel"))
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.fast.post_processor = None
    encoder.tokenizer.reread()
    for text in (TEXTS[0], LONG):
        [item], _ = encoder.encode([text], ["bus"])
        expected = encoder.tokenizer.fast.encode("bus", add_special_tokens=False)
        assert item.types is not None and item.types.sum() == len(expected)
        assert item.ids[item.types == 1].tolist() == expected.ids
