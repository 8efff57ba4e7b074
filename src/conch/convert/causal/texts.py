"""What language models are compared on: passages as token ids, prompts to be continued, and one long text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.convert import sentences
from conch.errors import invalid

#: A passage is cut here; shorter than ``LEAST`` it says nothing.
MOST: Final = 512
LEAST: Final = 8
#: All passages one after another, cut here: a context of many cache blocks.
LONG: Final = 1024
#: What a conversion has patience for, in tokens over all passages.
TOTAL: Final = 16_384
#: Prompts that are continued: how many, how long, and by how many tokens.
PROMPTS: Final = 16
PROMPT: Final = 32
CONTINUED: Final = 32


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
    def longest(self) -> int:
        return max(len(text) for text in self.compared)

    def stream(self, length: int) -> list[int]:
        """A prompt of exactly ``length`` tokens for measuring: the passages one after another, again and again."""
        joined = [token for text in self.compared for token in text]
        return (joined * (length // len(joined) + 1))[:length]


def load(encode: Callable[[str], list[int]], file: Path | None, context: int) -> Texts:
    """The built-in passages, or the texts of ``file``; ``context`` is the most tokens that the model takes.

    INVALID_ARG for a file without texts, and for one whose texts are all too short.
    """
    most = min(MOST, context)
    fitted, samples = sentences.split(sentences.load("text-generation", file))
    ids = [encode(sample.text) for sample in samples]
    long = [token for text in ids for token in text][: min(LONG, context)]
    compared: list[list[int]] = []
    for text in ids:
        if len(text) >= LEAST and sum(map(len, compared)) < TOTAL:
            compared.append(text[:most])
    if not compared:
        raise invalid(f"--data has no text of {LEAST} tokens or more")
    if len(long) > most:
        compared.append(long)
    return Texts(compared, _prompts(compared, context), [encode(sample.text)[:most] for sample in fitted])


def _prompts(texts: Sequence[Sequence[int]], context: int) -> list[list[int]]:
    """The beginnings of texts, none of which leaves less than half of the model's context."""
    length = min(PROMPT, max(1, context // 2))
    return [list(text[: min(length, max(1, len(text) // 2))]) for text in texts[:PROMPTS]]


def continued(context: int) -> int:
    """How many tokens prompts are continued by."""
    return max(1, min(CONTINUED, context - min(PROMPT, max(1, context // 2))))
