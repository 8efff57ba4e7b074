"""The bytes of tokens, which are those that the tokenizer's own decoding makes of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import decoders

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.fast import FastTokenizer, token_bytes
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from conch.core.errors import Code, ConchError
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace

TEXT = '{"a": "größe",\n\t"b": "日本語 🙂"}'


def opened(fast: Any, decoder: Any = None) -> FastTokenizer:
    if decoder is not None:
        fast.decoder = decoder
    special = [id for id, token in fast.get_added_tokens_decoder().items() if token.special]
    return FastTokenizer(fast, SpecialTokens(all_ids=frozenset(special)), ChatTemplate({}, {}, ""))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteLevel(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel(), decoders.Fuse()]),
    ],
    ids=["byte level", "fused", "after byte fallback", "between others"],
)
def test_bytes_are_those_of_texts_whatever_the_decoder_is_made_of(decoder: Any) -> None:
    tokenizer = opened(byte_level(), decoder)
    known = token_bytes(tokenizer)

    assert b"".join(known.tokens[id] for id in tokenizer.encode(TEXT)) == TEXT.encode()
    assert known.tokens[tokenizer.fast.token_to_id("Ġ")] == b" "
    assert known.tokens[tokenizer.fast.token_to_id("Ã")] == b"\xc3"
    assert known.tokens[tokenizer.fast.token_to_id("<日 think>")] == "<日 think>".encode()
    assert known.special_ids == {0, 1, 2}


@pytest.mark.parametrize("metaspace_decoder", [False, True])
def test_spaces_and_bytes_of_sentencepiece(metaspace_decoder: bool) -> None:
    tokenizer = opened(metaspace(metaspace_decoder=metaspace_decoder))
    known = token_bytes(tokenizer)

    assert b"".join(known.tokens[id] for id in tokenizer.encode(TEXT)) == f" {TEXT}".encode()
    assert known.tokens[tokenizer.fast.token_to_id("<0xE6>")] == b"\xe6"
    assert known.tokens[tokenizer.fast.token_to_id("<0xZZ>")] == b"<0xZZ>"


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (decoders.CTC(), "^its tokens add .*null.*, in which they are .*nul,"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ö", "oe")]), "^its tokens add .*Größe.*Groeße"),
    ],
    ids=["CTC", "characters replaced"],
)
def test_tokens_without_a_text_of_their_own_are_refused(decoder: Any, message: str) -> None:
    with pytest.raises(ConchError, match=message) as refused:
        token_bytes(opened(byte_level(), decoder))
    assert refused.value.code is Code.UNSUPPORTED
