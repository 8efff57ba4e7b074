"""Tokenizers of encoders in GGUF files: the same ids as transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from transformers import XLMRobertaTokenizer

from tests.text_checkpoints import wordpiece
from tests.unit.checkpoints.gguf_encoders import unigrams, wordpieces
from tests.unit.checkpoints.tokenizers.test_gguf import gpt, opened

ENCODED = ("How can you be sure?", "Anna  Smith's   bus, near Berlin!", "Café naïve 東京", "x[SEP]y", "...", "")


def test_wordpieces_are_those_of_bert(tmp_path: Path) -> None:
    made = wordpiece(tmp_path / "bert")
    by_id = sorted(made.get_vocab().items(), key=lambda item: item[1])
    own = gpt(**{f"tokenizer.ggml.{name}": value for name, value in wordpieces([text for text, _ in by_id]).items()})
    tokenizer = opened(tmp_path, own)
    for text in ENCODED:
        assert tokenizer.encode(text) == made(text)["input_ids"]
        (pair,) = tokenizer.encode_pairs([text], ["Hello!"], 64)
        assert pair.ids.tolist() == made(text, "Hello!")["input_ids"]
    assert tokenizer.special.cls_id == made.cls_token_id
    cased = opened(tmp_path, {**own, "tokenizer.ggml.normalizer.lowercase": False})
    assert cased.encode("HOW") != tokenizer.encode("HOW")


def test_unigrams_are_those_of_xlm_roberta(tmp_path: Path) -> None:
    pieces = [("▁", -2.0), ("▁How", -3.0), ("▁c", -4.0), ("an", -4.0), *((letter, -6.0) for letter in "aeinoy.!é")]
    special = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    made = XLMRobertaTokenizer(vocab=[*special, *pieces, ("<mask>", 0.0)])
    own = gpt(**{f"tokenizer.ggml.{name}": value for name, value in unigrams(pieces).items()})
    tokenizer = opened(tmp_path, own)
    for text in ENCODED:
        assert tokenizer.encode(text) == made(text)["input_ids"], text
        (pair,) = tokenizer.encode_pairs([text], ["How can"], 64)
        assert pair.ids.tolist() == made(text, "How can")["input_ids"]
