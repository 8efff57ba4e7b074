"""Prompts for the text between a prefix and a suffix, in the order of each family of models."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tokenizers")

from conch.checkpoints.tokenizers.infilling import infilling
from tests.unit.checkpoints.tokenizers.test_token_bytes import opened
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace


def made(fast: Any, *marks: str) -> Any:
    fast.add_special_tokens([*marks])
    return opened(fast)


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_prompt_is_the_text_that_the_families_document(marks: tuple[str, str, str]) -> None:
    tokenizer = made(byte_level(), *marks, "<|file_sep|>")
    known = infilling(tokenizer)
    assert known is not None
    prefix, suffix, middle = marks
    prompt = known.prompt(tokenizer, "def f(x):", ".well\n    return x")
    assert prompt == tokenizer.encode(f"{prefix}def f(x):{suffix}.well\n    return x{middle}")
    assert known.prompt(tokenizer, [5, 6], "")[1:3] == [5, 6]
    assert {*known.ends} == {tokenizer.fast.token_to_id(mark) for mark in (*marks, "<|file_sep|>")}


def test_mistral_reads_the_suffix_first() -> None:
    tokenizer = made(byte_level(), "[PREFIX]", "[SUFFIX]")
    known = infilling(tokenizer)
    assert known is not None
    assert known.prompt(tokenizer, "def f", "return") == tokenizer.encode("[SUFFIX]return[PREFIX]def f")


def test_sentencepiece_begins_the_prefix_with_a_space_and_the_suffix_without() -> None:
    tokenizer = made(metaspace(), "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    known = infilling(tokenizer)
    assert known is not None
    tokens = [tokenizer.token(id) for id in known.prompt(tokenizer, "ab", "ab")]
    assert tokens == ["▁<PRE>", "▁ab", "▁<SUF>", "ab", "▁<MID>"]


def test_other_vocabularies_do_not_fill_in() -> None:
    assert infilling(made(byte_level(), "<|fim_prefix|>")) is None
    assert infilling(made(metaspace())) is None
