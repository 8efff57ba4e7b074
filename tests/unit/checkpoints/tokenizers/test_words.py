"""Texts that are encoded by their words have the ids that the library gives."""

from __future__ import annotations

import random
import string
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from conch.checkpoints.tokenizers import words
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from conch.checkpoints.tokenizers.words import WordIds, divides_at_spaces

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_OTHERS = (
    "éßİﬁ中－，。😀\N{COMBINING ACUTE ACCENT}\N{ZERO WIDTH SPACE}\N{NO-BREAK SPACE}\x85\x1c\x7f\N{IDEOGRAPHIC SPACE}"
)


def bert(**settings: bool) -> Tokenizer:
    """A tokenizer as BERT's, whose vocabulary is of letters."""
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, *_OTHERS, "e", "th", "##th"]
    vocabulary = dict.fromkeys([*_SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    made = Tokenizer(
        models.WordPiece(
            {word: id for id, word in enumerate(vocabulary)}, unk_token="[UNK]", max_input_chars_per_word=20
        )
    )
    made.normalizer = normalizers.BertNormalizer(**settings)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL])
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def texts(count: int) -> list[str]:
    draw = random.Random(3)
    alphabet = string.printable + _OTHERS
    made = []
    for _ in range(count):
        source = alphabet if draw.random() < 0.5 else "ab ,.th"
        text = "".join(draw.choice(source) for _ in range(draw.randrange(60)))
        made.append(text + draw.choice(["", " [MASK] x", "a[SEP]b", "[UNK]", " \N{COMBINING ACUTE ACCENT}a", "x" * 70]))
    return made


def library(fast: Any) -> Any:
    return lambda texts: fast.encode_batch_fast(texts, add_special_tokens=False)


@pytest.mark.parametrize("settings", [{}, {"lowercase": False}, {"clean_text": False}, {"strip_accents": False}])
def test_ids_are_those_of_the_library(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_KNOWN", 2000)  # is reached
    fast = bert(**settings)
    assert divides_at_spaces(fast)
    own = WordIds(fast)
    given = texts(600)

    for _ in range(2):  # of new words, and of known ones
        for start in range(0, len(given), 20):
            some = given[start : start + 20]
            found = [ids.tolist() for ids in own.encode(some, library(fast))]
            assert found == [encoding.ids for encoding in library(fast)(some)]


def test_texts_of_known_words_do_not_go_through_the_library() -> None:
    fast, calls = bert(), []

    def encode(texts: Any) -> Any:
        calls.append(list(texts))
        return library(fast)(texts)

    own = WordIds(fast)
    for _ in range(4):
        own.encode(["the bat, (a hat)"], encode)
    assert len(calls) < 4
    calls.clear()
    own.encode(["the hat, (a bat)", "a  bat\n(a hat)"], encode)
    assert not calls


def test_several_threads_learn_the_same_words() -> None:
    fast = bert()
    given = texts(40)
    expected = [encoding.ids for encoding in library(fast)(given)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(50):
                own = WordIds(fast)
                for encoded in threads.map(lambda _, own=own: own.encode(given, library(fast)), range(4)):
                    assert [ids.tolist() for ids in encoded] == expected
    finally:
        sys.setswitchinterval(interval)


def test_pairs_and_truncated_texts_are_those_of_the_library() -> None:
    fast = bert()
    tokenizer = FastTokenizer(fast, SpecialTokens(), ChatTemplate({}, {}, ""))
    reference = bert()
    given = [text for text in texts(60) if text.strip()]
    for limit in (5, 12, 40):
        for side in ("left", "right"):
            reference.enable_truncation(limit, direction=side)
            for text, tokens in zip(given, tokenizer.encode_texts(given, limit, side=side), strict=True):
                assert tokens.ids.tolist() == reference.encode(text).ids
            pairs = list(zip(given, reversed(given), strict=True))
            encoded = tokenizer.encode_pairs(*map(list, zip(*pairs, strict=True)), limit, types=True, side=side)
            for pair, tokens in zip(pairs, encoded, strict=True):
                expected = reference.encode(*pair)
                assert tokens.types is not None
                assert (tokens.ids.tolist(), tokens.types.tolist()) == (expected.ids, expected.type_ids)


def test_tokenizers_whose_words_depend_on_others_are_left_to_the_library() -> None:
    with_space, normalized, sentences = bert(), bert(), bert()
    with_space.add_tokens([AddedToken("new york", normalized=False)])
    normalized.add_tokens(["york"])
    sentences.pre_tokenizer = pre_tokenizers.Metaspace()
    for fast in (with_space, normalized, sentences):
        assert not divides_at_spaces(fast)
