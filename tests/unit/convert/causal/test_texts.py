"""What language models are compared on."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.convert.causal.conversion import LONG_TEXT_TOKENS, PROMPT_TOKENS, continuation_tokens, load_texts
from conch.core.errors import ConchError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_built_in_passages_are_scored_continued_and_not_fitted_to() -> None:
    texts = load_texts(letters, None, 4096)

    assert texts.max_tokens == LONG_TEXT_TOKENS
    assert texts.tokens == sum(map(len, texts.compared)) - len(texts.compared)
    assert all(len(prompt) == PROMPT_TOKENS for prompt in texts.prompts)
    assert texts.fitted and not any(text in texts.compared for text in texts.fitted)


def test_a_short_context_bounds_everything() -> None:
    texts = load_texts(letters, None, 20)

    assert texts.max_tokens == 20
    assert all(len(prompt) + continuation_tokens(20) <= 20 for prompt in texts.prompts)


def test_prompts_for_measuring_repeat_the_texts(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdefgh\n")
    texts = load_texts(letters, tmp_path / "t.txt", 100)

    assert texts.stream(11) == letters("abcdefghabc")


def test_texts_of_a_few_tokens_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab\ncd\n")

    with pytest.raises(ConchError, match="no text of 8 tokens"):
        load_texts(letters, tmp_path / "t.txt", 100)
