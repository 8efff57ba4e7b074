"""Architectures whose state or masks need care, alone and in a batch, beside ``generate`` of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.day_zero.causal import compare_causal
from benchmarks.day_zero.checkpoints import architectures, write


@pytest.mark.parametrize(
    "kind",
    [
        "bert",  # an encoder with a language head: is_decoder is false
        "bert-generation",
        "deepseek_v2",
        "doge",  # keeps the best keys beyond a window, and the first of equals
        "jamba",
        "minicpm3",
        "qwen3_5_text",
        "qwen3_next",
        "xlnet",  # has -1 positions
    ],
)
def test_tokens_are_those_of_generate(tmp_path: Path, kind: str) -> None:
    (architecture,) = [one for one in architectures("causal") if one.kind == kind]
    write(tmp_path, architecture)
    outcome = compare_causal(tmp_path)
    assert (outcome.verdict, outcome.reason) == ("exact", "")
