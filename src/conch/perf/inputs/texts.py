"""Natural texts for requests: of a mix of lengths, different in each request.

Built from the sentences on which ``conch convert`` compares variants.  Lengths are estimates: words and punctuation
marks, 5 % more for words that tokenizers split, and two special tokens.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Final

from conch.texts import builtin
from conch.texts.shapes import Mix, Shape

#: Lengths of texts where no mix is given, and their share of the requests: queries and titles, sentences, passages.
DEFAULT_MIX: Final[Mix] = {
    Shape(1, 10): 0.2, Shape(1, 16): 0.25, Shape(1, 32): 0.25, Shape(1, 64): 0.15, Shape(1, 128): 0.1,
    Shape(1, 256): 0.05,
}  # fmt: skip
#: The special tokens of a text, and those of the number with which it begins.
_AROUND: Final = 5
_SPLIT: Final = 1.05
#: Of so many sentences that fit, the longest is taken: texts have few of them, as written ones do.
_TRIES: Final = 3
#: So many requests follow the mix, in random order.
_BLOCK: Final = 20
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")
#: How a text may begin: senders find its number by the characters that follow.
_BEGINNING: Final = re.compile(r"[A-Za-z0-9 ,']{4,}")


def tokens_of(text: str) -> int:
    """Estimate the tokens of a numbered text, including special tokens."""
    return round(_SPLIT * (_words(text) - 1)) + _AROUND


def shapes_of(mix: Mix, count: int, random: Random) -> list[Shape]:
    """The shapes of ``count`` requests: any twenty in a row follow ``mix`` as closely as possible."""
    owed = dict.fromkeys(mix, 0.0)
    shapes = []
    for _ in range(count):
        for shape, share in mix.items():
            owed[shape] += share
        next_shape = max(owed, key=owed.__getitem__)
        owed[next_shape] -= 1
        shapes.append(next_shape)
    blocks = [shapes[start : start + _BLOCK] for start in range(0, count, _BLOCK)]
    for block in blocks:
        random.shuffle(block)
    return [shape for block in blocks for shape in block]


class TextWriter:
    """Writes texts of given lengths.

    Each begins with a number of six digits, which senders change from request to request.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._parts = sorted({(_words(part), part) for part in _parts() if _BEGINNING.match(part)})
        self._questions = [question for document in builtin.documents() for question in document.questions]

    def text(self, tokens: int) -> str:
        """A text of at most ``tokens`` tokens and only slightly fewer, with at least one short sentence."""
        left = int((tokens - _AROUND) / _SPLIT)
        shortest = self._parts[0][0]
        parts = [self._part(max(left, shortest))]
        while (left := left - _words(parts[-1])) >= shortest:
            parts.append(self._part(left))
        return self._numbered(" ".join(parts))

    def question(self) -> str:
        """A question of 9 to 17 tokens."""
        return self._numbered(self._random.choice(self._questions))

    def _numbered(self, text: str) -> str:
        return f"{self._random.randrange(10**5, 10**6)} {text}"

    def _part(self, most: int) -> str:
        """A sentence or a passage of at most ``most`` words."""
        fitting = next((place for place, (words, _) in enumerate(self._parts) if words > most), len(self._parts))
        return self._parts[max(self._random.randrange(fitting) for _ in range(_TRIES))][1]


def _parts() -> Iterator[str]:
    """Sentences, passages, and the sentences of passages."""
    yield from builtin.sentences()
    for passage in (*builtin.passages(), *(document.context for document in builtin.documents())):
        yield passage
        yield from _SENTENCE_END.split(passage)


def _words(text: str) -> int:
    return len(_TOKEN.findall(text))
