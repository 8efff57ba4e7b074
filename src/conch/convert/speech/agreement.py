"""Compares transcripts with the reference's by word error rate, and judges a variant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from conch.convert.evidence import bootstrap

_WORD: Final = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Errors:
    """The word errors of recordings: substituted, missing and added words, and the number of words, by recording."""

    errors: Sequence[int]
    words: Sequence[int]

    @property
    def rate(self) -> float:
        """The word error rate; infinite for added words where none were spoken."""
        return self.of(range(len(self.words)))

    def of(self, recordings: Sequence[int]) -> float:
        """Return the word error rate of some recordings, given by index."""
        errors, words = (sum(values[index] for index in recordings) for values in (self.errors, self.words))
        return errors / words if words else float("inf") if errors else 0.0


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.casefold())


def word_errors(expected: Sequence[str], actual: Sequence[str]) -> Errors:
    """Return the word errors of transcripts ``actual`` against the texts ``expected``."""
    pairs = [(words_of(a), words_of(b)) for a, b in zip(expected, actual, strict=True)]
    return Errors([_distance(a, b) for a, b in pairs], [len(a) for a, _ in pairs])


def _distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Return Levenshtein's distance of two sequences of words."""
    row = list(range(len(b) + 1))
    for index, word in enumerate(a, 1):
        before, row[0] = row[0], index
        for at, other in enumerate(b, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (word != other))
    return row[-1]


@dataclass(frozen=True, slots=True)
class SpeechAgreement:
    """Agreement of a variant's transcripts.

    ``value`` is its word error rate against the spoken texts, ``delta`` the difference from that of torch in fp32, with
    its 95 % interval ``low`` to ``high``; all are nan if the texts are not known. ``changed`` is the word error rate
    against torch's transcripts, ``identical`` the share of recordings with the same transcript, of ``words`` words in
    ``recordings`` recordings.
    """

    value: float
    delta: float
    low: float
    high: float
    changed: float
    identical: float
    words: int
    recordings: int

    def to_json(self) -> dict[str, Mapping[str, Any]]:
        """Return the figures by metric, as stored in ``conch.json``."""
        figures = asdict(self)
        word_error_rate = {name: figures[name] for name in ("value", "delta", "low", "high")}
        known = self.value == self.value
        transcripts = {name: figures[name] for name in ("changed", "identical", "words", "recordings")}
        return {**({"word_error_rate": word_error_rate} if known else {}), "transcripts": transcripts}


def compare(texts: Sequence[str], reference: Sequence[str], variant: Sequence[str]) -> SpeechAgreement:
    """Compare transcripts of the same recordings; ``texts`` are the spoken ones, empty if they are not known."""
    changed = word_errors(reference, variant)
    identical = sum(a == b for a, b in zip(reference, variant, strict=True)) / len(reference)
    value = delta = low = high = float("nan")
    words = sum(changed.words)
    if texts:
        before, after = word_errors(texts, reference), word_errors(texts, variant)
        value, delta, words = after.rate, after.rate - before.rate, sum(after.words)
        low, high = bootstrap(len(texts), lambda drawn: after.of(drawn.tolist()) - before.of(drawn.tolist()))
    return SpeechAgreement(value, delta, low, high, changed.rate, identical, words, len(reference))


@dataclass(frozen=True, slots=True)
class SpeechTolerance:
    """The tolerance of a precision: the maximum rise of the word error rate, and of words that differ from torch's."""

    delta: float
    changed: float


TOLERANCES: Final[Mapping[str, SpeechTolerance]] = {
    # The same arithmetic in another order: an occasional near-tie, after which a sentence may differ.
    "fp32": SpeechTolerance(delta=0.005, changed=0.01),
    "bf16": SpeechTolerance(delta=0.01, changed=0.03),
    "int8": SpeechTolerance(delta=0.01, changed=0.04),
}


def reasons(precision: str, figures: SpeechAgreement) -> tuple[str, ...]:
    """Return why a variant is refused, one sentence per missed bound; empty if it passes."""
    tolerance = TOLERANCES[precision]
    missed = []
    if figures.delta > tolerance.delta:
        missed.append(
            f"word error rate {figures.value:.2%} is {figures.delta:.2%} above the reference's, "
            f"more than {tolerance.delta:.2%}"
        )
    if not figures.changed <= tolerance.changed:
        missed.append(
            f"{figures.changed:.2%} of the words differ from the reference's transcripts, "
            f"more than {tolerance.changed:.2%}"
        )
    return tuple(missed)
