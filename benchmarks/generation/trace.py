"""What is asked, and when: made once a round, the same for every server.

Nothing is asked twice in a round, since a server that keeps prefixes would not compute it again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from conch.convert.sentences import load

SEED: Final = 20261121


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and how many tokens are to follow it, neither more nor fewer."""

    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop, an open one, or both at a time.

    Closed: ``connections`` take from ``asks``, each the next when it has its answer, until ``seconds`` have passed and
    each has had ``least`` answers, or until there is no more.  Open: ``arrivals`` are sent at their times (seconds
    from the start), whatever is still under way.  What has been sent is waited for.
    """

    asks: Sequence[Ask] = ()
    connections: int = 0
    seconds: float = math.inf
    least: int = 0
    arrivals: Sequence[tuple[float, Ask]] = ()

    def document(self) -> dict[str, Any]:
        """It as JSON has it."""
        seconds = None if math.isinf(self.seconds) else self.seconds
        return {**asdict(self), "seconds": seconds}

    @classmethod
    def read(cls, document: dict[str, Any]) -> Load:
        """What :meth:`document` wrote."""
        seconds = document["seconds"]
        return cls(
            [Ask(**ask) for ask in document["asks"]],
            document["connections"],
            math.inf if seconds is None else seconds,
            document["least"],
            [(at, Ask(**one)) for at, one in document["arrivals"]],
        )


class Prompts:
    """Random words, as many as make up a number of tokens; the same for the same ``seed``."""

    def __init__(self, words: Sequence[tuple[str, int]], seed: int) -> None:
        self.words = words
        self.random = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        """One of so many tokens."""
        chosen = []
        while tokens:
            word, size = self.random.choice(self.words)
            if size <= tokens:
                chosen.append(word)
                tokens -= size
        return " ".join(chosen)

    def uniform(self, count: int, prompt: int, tokens: int) -> list[Ask]:
        """All prompts and all answers of one length."""
        return [Ask(self.prompt(prompt), tokens) for _ in range(count)]

    def mixed(self, count: int, shortest: int, longest: int, tokens: int) -> list[Ask]:
        """Prompts of ``shortest`` to ``longest`` tokens, as many short as long ones on a logarithmic scale."""
        low, high = math.log(shortest), math.log(longest)
        return [Ask(self.prompt(round(math.exp(self.random.uniform(low, high)))), tokens) for _ in range(count)]

    def poisson(self, count: int, rate: float, prompt: int, fewest: int, most: int) -> list[tuple[float, Ask]]:
        """``rate`` arrivals a second on average, with answers of ``fewest`` to ``most`` tokens."""
        return [(at, Ask(self.prompt(prompt), self.random.randint(fewest, most))) for at in self._moments(count, rate)]

    def _moments(self, count: int, rate: float) -> Iterator[float]:
        at = 0.0
        for _ in range(count):
            yield at
            at += self.random.expovariate(rate)


def words(encode: Callable[[str], Sequence[int]]) -> list[tuple[str, int]]:
    """The words of the sentences that ``conch convert`` compares on, and what each adds to a prompt in tokens."""
    known = sorted({word for sample in load("feature-extraction") for word in sample.text.split() if word.isalpha()})
    # A single token always fits what is left of a prompt.
    return [(word, len(encode(f" {word}"))) for word in known]
