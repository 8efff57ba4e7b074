"""Encoder-decoder models beside ``generate`` of transformers, alone and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.day_zero.checkpoints import architectures, write
from benchmarks.day_zero.seq2seq import compare_seq2seq
from conch.backends.tasks import text2text
from conch.backends.tasks.encoders.encoder_task import Sharing
from conch.backends.tasks.text2text import Text2Text
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError


def written(folder: Path, kind: str) -> Path:
    [architecture] = [one for one in architectures("seq2seq") if one.kind == kind]
    write(folder, architecture)
    return folder


def opened(folder: Path, **options: Any) -> Text2Text:
    checkpoint = Checkpoint.open(folder, Options(threads=1, **options))
    return Text2Text(checkpoint, no_engine)


def no_engine(head: str) -> Any:
    raise AssertionError(head)


@pytest.mark.parametrize("kind", ["bigbird_pegasus", "seamless_m4t", "t5"])
def test_tokens_are_those_of_generate(tmp_path: Path, kind: str) -> None:
    outcome = compare_seq2seq(written(tmp_path, kind))
    assert (outcome.verdict, outcome.reason) == ("exact", "")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("t5"), "t5")


@pytest.mark.parametrize(
    ("sharing", "runs"),
    [
        (Sharing.PADDED, [[1, 0, 2, 3]]),
        (Sharing.EQUAL, [[1], [0, 2], [3]]),
        (Sharing.ALONE, [[1], [0], [2], [3]]),
    ],
)
def test_texts_share_a_run_where_none_changes_the_other(
    t5: Path, monkeypatch: pytest.MonkeyPatch, sharing: Sharing, runs: list[list[int]]
) -> None:
    monkeypatch.setattr(text2text, "examine", lambda *given: sharing)
    assert opened(t5).runs([3, 7, 3, 2]) == runs


def test_model_that_answers_otherwise_in_a_batch_is_refused(t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Text2Text.write

    def wrong_together(self: Text2Text, texts: Any, generation: Any, **arguments: Any) -> list[list[int]]:
        answers = right(self, texts, generation, **arguments)
        return answers if len(texts) == 1 else [[token + 1 for token in answer] for answer in answers]

    monkeypatch.setattr(text2text, "examine", lambda *given: Sharing.PADDED)
    monkeypatch.setattr(Text2Text, "write", wrong_together)
    monkeypatch.setattr(text2text, "SLOW_STEP", float("inf"))  # compare on a busy machine, too
    with pytest.raises(
        ConchError, match=r"results differ from those of transformers: for a text of \d+ tokens among 3"
    ):
        opened(t5)
    opened(t5, verify_on_load=False)


def test_model_that_continues_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="needs an encoder-decoder, which GraniteSpeech"):
        opened(written(tmp_path, "granite_speech"))
