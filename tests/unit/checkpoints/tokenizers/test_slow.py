"""A tokenizer in Python gives what one of ``tokenizers`` gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import SlowTokenizer, open_tokenizer
from tests.text_checkpoints import TEXTS
from tests.unit.checkpoints.tokenizers.encoders import LONG, in_python, opened


class InPython:
    """A tokenizer of transformers that passes for one written in Python."""

    is_fast = False

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def __len__(self) -> int:
        return len(self._loaded)


def test_special_tokens_are_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    checkpoint = Checkpoint.open(copy, Options(task="feature-extraction"))
    loaded = InPython(AutoTokenizer.from_pretrained(copy))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *given, **options: loaded)
    (copy / "tokenizer.json").unlink()
    slow = open_tokenizer(checkpoint)
    assert isinstance(slow, SlowTokenizer) and slow.special.mask_id is not None
    assert slow.special == opened(folder).tokenizer.special


def test_ids_and_texts_are_the_same(folder: Path) -> None:
    fast = opened(folder)
    slow = in_python(folder, fast)
    for texts, pairs in (([*TEXTS, LONG], None), ([*TEXTS, LONG], [LONG, *TEXTS])):
        (ones, cut), (twos, also_cut) = fast.encode(texts, pairs), slow.encode(texts, pairs)
        assert [one.ids.tolist() for one in ones] == [two.ids.tolist() for two in twos] and cut == also_cut
        assert [one.length for one in ones] == [two.length for two in twos]
    ids = ones[0].ids.tolist()
    ours, others = slow.tokenizer, fast.tokenizer
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == others.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, clean_up=True) == others.decode(ids, clean_up=True)
    assert ours.join([ours.token(id) for id in ids]) == others.join([others.token(id) for id in ids])


def test_only_the_first_of_a_pair_is_shortened_when_asked(folder: Path) -> None:
    fast = opened(folder)
    slow = in_python(folder, fast)
    [one], [two] = (encoder.encode([LONG], [TEXTS[0]], truncation="first")[0] for encoder in (fast, slow))
    assert one.ids.tolist() == two.ids.tolist()
