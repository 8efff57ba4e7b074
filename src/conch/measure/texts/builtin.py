"""The built-in texts: English sentences, passages, and passages with questions about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_DATA: Final = Path(__file__).with_name("data")


@dataclass(frozen=True, slots=True)
class QuestionedPassage:
    """A passage with questions about it; the passage may not answer the last question."""

    context: str
    questions: tuple[str, ...]


@cache
def sentences() -> tuple[str, ...]:
    """148 sentences of 4 to 150 words."""
    return _lines("sentences.txt")


@cache
def passages() -> tuple[str, ...]:
    """12 passages of about 120 words."""
    return _lines("passages.txt")


@cache
def documents() -> tuple[QuestionedPassage, ...]:
    """14 passages of about 60 words, with four to six questions each."""
    read = (json.loads(line) for line in _lines("questions.jsonl"))
    return tuple(QuestionedPassage(entry["context"], tuple(entry["questions"])) for entry in read)


def _lines(name: str) -> tuple[str, ...]:
    return tuple((_DATA / name).read_text(encoding="utf-8").splitlines())
