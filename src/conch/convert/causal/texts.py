"""What language models are compared on: passages as token ids, prompts to be continued, and one long text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.convert import sentences
from conch.errors import invalid
from conch.sampling import TEXT_GENERATION

#: A passage is cut at the one; shorter than the other it says nothing.
MAX_PASSAGE_TOKENS: Final = 512
MIN_PASSAGE_TOKENS: Final = 8
#: All passages one after another, cut here: a context of many cache blocks.
LONG_TEXT_TOKENS: Final = 1024
#: What a conversion has patience for, in tokens over all passages.
MAX_TOKENS: Final = 16_384
#: Prompts that are continued: how many, of how many tokens, and by how many.
PROMPTS: Final = 16
PROMPT_TOKENS: Final = 32
CONTINUATION_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids: ``compared`` are scored, ``prompts`` continued, ``fitted`` are for calibration and in neither."""

    compared: list[list[int]]
    prompts: list[list[int]]
    fitted: list[list[int]]

    @property
    def tokens(self) -> int:
        """How many tokens are predicted: all but the first of each text."""
        return sum(len(text) - 1 for text in self.compared)

    @property
    def max_tokens(self) -> int:
        """The length of the longest text."""
        return max(len(text) for text in self.compared)

    def stream(self, length: int) -> list[int]:
        """A prompt of exactly ``length`` tokens for measuring: the passages one after another, again and again."""
        joined = [token for text in self.compared for token in text]
        return (joined * (length // len(joined) + 1))[:length]


def load(encode: Callable[[str], list[int]], file: Path | None, context: int) -> Texts:
    """The built-in passages, or the texts of ``file``; ``context`` is the most tokens that the model takes.

    INVALID_ARG for a file without texts, and for one whose texts are all too short.
    """
    most = min(MAX_PASSAGE_TOKENS, context)
    fitted, samples = sentences.split(sentences.load(TEXT_GENERATION, file))
    ids = [encode(sample.text) for sample in samples]
    compared: list[list[int]] = []
    for text in ids:
        if len(text) >= MIN_PASSAGE_TOKENS and sum(map(len, compared)) < MAX_TOKENS:
            compared.append(text[:most])
    if not compared:
        raise invalid(f"--data has no text of {MIN_PASSAGE_TOKENS} tokens or more")
    long = [token for text in ids for token in text][: min(LONG_TEXT_TOKENS, context)]
    if len(long) > most:
        compared.append(long)
    # No prompt takes more than half of its text, or of the context.
    prompts = [text[: min(_prompt_tokens(context), max(1, len(text) // 2))] for text in compared[:PROMPTS]]
    return Texts(compared, prompts, [encode(sample.text)[:most] for sample in fitted])


def _prompt_tokens(context: int) -> int:
    return min(PROMPT_TOKENS, max(1, context // 2))


def continuation_tokens(context: int) -> int:
    """How many tokens are generated after a prompt, in a model that sees ``context`` tokens."""
    return max(1, min(CONTINUATION_TOKENS, context - _prompt_tokens(context)))
