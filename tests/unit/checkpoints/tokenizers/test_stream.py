"""Text as it comes is the text of all ids at once, however they are divided."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, decoders

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.stream import (
    ByteStream,
    PieceStream,
    TextStream,
    WindowStream,
    decoder_of,
    open_stream,
)
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace, unigram, wordpiece

MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "metaspace with byte fallback": metaspace,
    "the same without a space in front": lambda: metaspace(strip=False),
    "byte fallback before metaspace": lambda: metaspace(metaspace_decoder=True),
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@cache
def opened(kind: str) -> FastTokenizer:
    fast = MADE[kind]()
    special = frozenset(id for id, token in fast.get_added_tokens_decoder().items() if token.special)
    return FastTokenizer(fast, SpecialTokens(all_ids=special), ChatTemplate({}, {}, kind))


def streamed(stream: TextStream, ids: list[int], cuts: random.Random) -> list[str]:
    parts = []
    while ids:
        size = cuts.randrange(1, 4)
        parts.append(stream.add(ids[:size]))
        ids = ids[size:]
    return [*parts, stream.flush()]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_pieces_are_the_whole(kind: str, skip: bool) -> None:
    tokenizer = opened(kind)
    draw = random.Random(kind)
    for _ in range(3000):
        ids = [draw.randrange(tokenizer.vocabulary + 2) for _ in range(draw.randrange(1, 14))]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        parts = streamed(tokenizer.stream(skip_special_tokens=skip), ids, draw)
        assert "".join(parts) == whole, [tokenizer.fast.id_to_token(id) for id in ids]


@pytest.mark.parametrize("table", [True, False])
def test_special_tokens_that_are_kept_have_text(table: bool) -> None:
    tokenizer = opened("byte-level")
    start, end, word = tokenizer.encode("<|im_start|><|im_end|>a")
    kept = frozenset({start})
    if table:
        stream = tokenizer.stream(kept=kept)
    else:
        decode = decoder_of(tokenizer.decode, tokenizer.special.all_ids, skip=True, kept=kept)
        stream = open_stream(None, decode, ())
    assert stream.add([start, end, word]) + stream.flush() == "<|im_start|>a"


@pytest.mark.parametrize("kind", ["byte-level", "metaspace with byte fallback"])
def test_text_comes_back_token_by_token(kind: str) -> None:
    tokenizer = opened(kind)
    text = "hello 日本語 🙂 a  ab"
    stream = tokenizer.stream()
    parts = [stream.add([id]) for id in tokenizer.encode(text, special_tokens=False)]

    assert "".join([*parts, stream.flush()]) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace with byte fallback"])
def test_half_a_character_is_kept_until_the_end(kind: str) -> None:
    tokenizer = opened(kind)
    whole = tokenizer.encode("🙃", special_tokens=False)
    assert len(whole) > 1
    stream = tokenizer.stream()

    assert stream.add(whole[:-1]).strip() == ""
    assert stream.flush() == tokenizer.decode(whole[:-1]).lstrip(" ")
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", MADE)
def test_nothing_is_nothing(kind: str) -> None:
    stream = opened(kind).stream()
    assert (stream.add([]), stream.flush()) == ("", "")


def test_first_word_has_its_space_after_a_prompt() -> None:
    tokenizer = opened("metaspace with byte fallback")
    word = tokenizer.fast.token_to_id("▁ab")

    assert tokenizer.stream().add([word]) == "ab"
    assert tokenizer.stream(after=[word]).add([word]) == " ab"
    assert tokenizer.stream(after=[tokenizer.fast.token_to_id("<s>")]).add([word]) == "ab"


def test_kinds_have_the_streams_that_are_made_for_them() -> None:
    kinds = {kind: type(opened(kind).stream()) for kind in MADE}
    assert kinds.pop("byte-level") is ByteStream
    assert set(kinds.values()) == {PieceStream}


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.Strip("a", 2, 1), None])
def test_decoder_that_sees_tokens_together_gets_a_window(decoder: object) -> None:
    fast = byte_level()
    fast.decoder = decoder
    assert isinstance(FastTokenizer(fast, SpecialTokens(), ChatTemplate({}, {}, "")).stream(), WindowStream)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace with byte fallback"])
def test_window_gives_text_in_whole_characters(kind: str) -> None:
    tokenizer = opened(kind)
    text = "hello 日本語 🙂 a  ab, é!"
    stream = WindowStream(tokenizer.decode)
    parts = [stream.add([id]) for id in tokenizer.encode(text, special_tokens=False)]

    assert "".join([*parts, stream.flush()]) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_window_continues_after_bytes_that_are_no_text() -> None:
    tokenizer = opened("byte-level")
    broken = tokenizer.fast.token_to_id("ÿ")
    stream = WindowStream(tokenizer.decode)
    parts = [stream.add([broken]) for _ in range(50)]

    assert "".join([*parts, stream.flush()]) == tokenizer.decode([broken] * 50)
    assert any(parts)


def test_one_token_is_shown_with_its_space() -> None:
    tokenizer = opened("metaspace with byte fallback")
    assert tokenizer.piece(tokenizer.fast.token_to_id("▁ab")) == " ab"
    assert tokenizer.piece(tokenizer.fast.token_to_id("</s>")) == "</s>"
    assert tokenizer.piece(tokenizer.fast.token_to_id("<0xFF>")) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.piece(tokenizer.vocabulary + 5) == ""
    assert opened("byte-level").piece(opened("byte-level").fast.token_to_id("<|im_end|>")) == "<|im_end|>"
