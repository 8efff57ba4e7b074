"""Texts and pairs as networks read them: the ids of transformers, cut or refused by the maximum length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.core.errors import Code, ConchError
from tests.text_checkpoints import TEXTS, write
from tests.unit.checkpoints.tokenizers.encoders import LONG, in_python, opened


def test_texts_and_pairs_equal_those_of_transformers(folder: Path) -> None:
    encoder, reference = opened(folder), AutoTokenizer.from_pretrained(folder)
    texts = [*TEXTS, "", " two  spaces ", "Ünïcode 北京 🙂", LONG]
    for pairs in (None, texts[::-1], [LONG] * len(texts)):
        items, cut = encoder.encode(texts, pairs)
        expected = reference(texts, pairs, truncation=True, return_token_type_ids=True)
        assert [item.ids.tolist() for item in items] == expected["input_ids"]
        types = [[0] * len(item.ids) if item.types is None else item.types.tolist() for item in items]
        assert types == expected["token_type_ids"]
        assert cut == sum(len(ids) > 64 for ids in reference(texts, pairs)["input_ids"])


def test_only_the_first_of_a_pair_is_shortened_when_asked(folder: Path) -> None:
    [item], cut = opened(folder).encode([LONG], [TEXTS[0]], truncation="first")
    expected = AutoTokenizer.from_pretrained(folder)(LONG, TEXTS[0], truncation="only_first")
    assert item.ids.tolist() == expected["input_ids"] and cut == 1
    with pytest.raises(ConchError, match=r"input 'text_pair' has \d+ tokens in row 0; the model takes at most 64"):
        opened(folder).encode([TEXTS[0]], [LONG], truncation="first")


def test_shortened_texts_keep_their_offsets(folder: Path) -> None:
    [item], _ = opened(folder).encode([LONG], offsets=True)
    expected = AutoTokenizer.from_pretrained(folder)(LONG, truncation=True, return_offsets_mapping=True)
    assert item.offsets == expected["offset_mapping"]


def test_long_texts_are_refused_where_the_configuration_says_so(folder: Path) -> None:
    encoder = opened(folder, truncation="refuse", max_length=16)
    with pytest.raises(
        ConchError, match=r"^input 'text_input' has \d\d+ tokens in row 1; the model takes at most 16$"
    ) as error:
        encoder.encode([TEXTS[3], LONG])
    assert error.value.code is Code.INVALID_ARG


def test_texts_without_tokens_are_refused_where_nothing_is_added(folder: Path) -> None:
    encoder = opened(folder)
    assert isinstance(encoder.tokenizer, FastTokenizer)
    encoder.tokenizer.fast.post_processor = None
    encoder.tokenizer.reread()
    with pytest.raises(ConchError, match="input 'text_input' has no tokens in row 1"):
        encoder.encode(["a", ""])


def test_threads_share_a_tokenizer(folder: Path) -> None:
    encoder = opened(folder)
    texts = [LONG, *TEXTS]
    expected = [item.ids.tolist() for item in encoder.encode(texts)[0]]
    with ThreadPoolExecutor(4) as pool:
        for items, cut in pool.map(lambda _: encoder.encode(texts), range(50)):
            assert [item.ids.tolist() for item in items] == expected and cut == 1


def test_many_texts_are_tokenised_in_parts(folder: Path) -> None:
    items, cut = opened(folder).encode([TEXTS[3]] * 2500 + [LONG])
    assert len(items) == 2501 and cut == 1 and items[2499].ids.tolist() == items[0].ids.tolist()


def test_what_the_tokenizer_cannot_read_is_the_fault_of_the_text(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModel")
    words = Tokenizer(models.WordLevel({"station": 0}, unk_token="unknown"))
    words.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConchError, match="input 'text_input' cannot be tokenised: WordLevel error") as error:
        opened(folder).encode(["station", "market"])
    assert error.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("most", [1, 2])
def test_a_maximum_that_leaves_no_room_for_text_is_refused(folder: Path, most: int) -> None:
    message = rf"max_length is {most} tokens, .*: the tokenizer puts 2 special tokens around a text, so it must be"
    with pytest.raises(ConchError, match=message) as error:
        opened(folder, max_length=most)
    assert error.value.code is Code.INVALID_ARG
    assert opened(folder, max_length=3).room() == 1
    with pytest.raises(ConchError, match=message):
        InputEncoder(in_python(folder, opened(folder)).tokenizer, most)
