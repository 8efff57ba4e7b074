"""The requests and their times: created once per round, the same for every server.

No prompt occurs twice in a round, because a server with a prefix cache would not compute it again.
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
    """A prompt, the exact number of tokens to generate, and the JSON schema that they begin a text of, if any."""

    prompt: str
    tokens: int
    schema: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop, an open loop, or both at the same time.

    Closed: each of the ``connections`` sends the next of ``asks`` when its previous response is complete, until
    ``seconds`` have passed and each has had ``least`` responses, or ``asks`` are exhausted. Open: ``arrivals`` are
    sent at their times (seconds from the start), regardless of in-flight requests. All sent requests are completed.
    """

    asks: Sequence[Ask] = ()
    connections: int = 0
    seconds: float = math.inf
    least: int = 0
    arrivals: Sequence[tuple[float, Ask]] = ()

    def document(self) -> dict[str, Any]:
        """Return the load as a JSON document."""
        seconds = None if math.isinf(self.seconds) else self.seconds
        return {**asdict(self), "seconds": seconds}

    @classmethod
    def read(cls, document: dict[str, Any]) -> Load:
        """Read the result of :meth:`document`."""
        seconds = document["seconds"]
        return cls(
            [Ask(**ask) for ask in document["asks"]],
            document["connections"],
            math.inf if seconds is None else seconds,
            document["least"],
            [(at, Ask(**ask)) for at, ask in document["arrivals"]],
        )


class Prompts:
    """Prompts of random words with a given number of tokens; the same for the same ``seed``."""

    def __init__(self, words: Sequence[tuple[str, int]], seed: int) -> None:
        self.words = words
        self.random = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        """Return a prompt with this many tokens."""
        chosen = []
        while tokens:
            word, size = self.random.choice(self.words)
            if size <= tokens:
                chosen.append(word)
                tokens -= size
        return " ".join(chosen)

    def uniform(self, count: int, prompt: int, tokens: int) -> list[Ask]:
        """Return requests with equal prompt lengths and equal completion lengths."""
        return [Ask(self.prompt(prompt), tokens) for _ in range(count)]

    def mixed(self, count: int, shortest: int, longest: int, tokens: int) -> list[Ask]:
        """Return prompts of ``shortest`` to ``longest`` tokens, uniform on a logarithmic scale."""
        low, high = math.log(shortest), math.log(longest)
        return [Ask(self.prompt(round(math.exp(self.random.uniform(low, high)))), tokens) for _ in range(count)]

    def poisson(self, count: int, rate: float, prompt: int, fewest: int, maximum: int) -> list[tuple[float, Ask]]:
        """Return ``rate`` arrivals per second on average, with completions of ``fewest`` to ``most`` tokens."""
        return [
            (at, Ask(self.prompt(prompt), self.random.randint(fewest, maximum))) for at in self._moments(count, rate)
        ]

    def _moments(self, count: int, rate: float) -> Iterator[float]:
        at = 0.0
        for _ in range(count):
            yield at
            at += self.random.expovariate(rate)


def words(encode: Callable[[str], Sequence[int]]) -> list[tuple[str, int]]:
    """Return the words of ``conch convert``'s sentences, and the number of tokens that each adds to a prompt."""
    known = sorted({word for sample in load("feature-extraction") for word in sample.text.split() if word.isalpha()})
    # A word of a single token always fits the rest of a prompt.
    return [(word, len(encode(f" {word}"))) for word in known]
