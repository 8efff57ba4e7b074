"""Special tokens are those that transformers finds in the same files, matched in texts as there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from tokenizers import AddedToken

from conch.checkpoints.tokenizers.open import open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import SpecialTokens
from tests.unit.checkpoints.folders import bare
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level

FLAGS = {"content": "<mask>", "rstrip": False, "single_word": False, "special": True, "normalized": False}
PLAIN, STRIPPING = {**FLAGS, "lstrip": False}, {**FLAGS, "lstrip": True}


@pytest.mark.parametrize("known", [True, False], ids=["in tokenizer.json", "not in tokenizer.json"])
@pytest.mark.parametrize(
    "settings",
    [
        {"mask_token": "<mask>"},
        {"mask_token": {"__type": "AddedToken", **PLAIN}},
        {"mask_token": {"__type": "AddedToken", **STRIPPING}},
        {"mask_token": "<mask>", "added_tokens_decoder": {"404": STRIPPING}},
        {"additional_special_tokens": ["<mask>"], "cls_token": "<|im_start|>", "pad_token": "<pad>"},
        {"extra_special_tokens": {"image_token": "<mask>"}, "unk_token": "hello"},
    ],
)
def test_tokens_are_matched_and_hidden_as_in_transformers(
    tmp_path: Path, settings: dict[str, Any], known: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    made = byte_level()
    if known:
        made.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    document = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(document))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(bare(tmp_path))

    found = ours.special
    assert (found.mask_id, found.cls_id, found.unk_id, found.pad_id) == (
        theirs.mask_token_id, theirs.cls_token_id, theirs.unk_token_id, theirs.pad_token_id,
    )  # fmt: skip
    assert found.all_ids >= set(theirs.all_special_ids)
    for text in ("a <mask> b", "<mask>", "hello<pad> <|im_start|>  <mask>"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_padding_is_the_first_that_is_an_id() -> None:
    ids = {"</s>": 2, "<pad>": 3}
    found = SpecialTokens.of({"eos_token": "</s>"}, ids.get, (2,), pad_ids=(None, "x", -1, 7, 8))
    assert (found.pad_id, found.eos_ids, found.bos_id) == (7, (2,), None)
    found = SpecialTokens.of({"eos_token": "</s>", "pad_token": "<pad>"}, ids.get, (2,), eos_ids=(5, 6), pad_ids=(7,))
    assert (found.pad_id, found.eos_ids) == (3, (5, 6))
