"""The questions: the load of each, created anew for every round, and the figures computed from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.generation.figures import FIRST, GAPS, LATENCY, THROUGHPUT, Figure
from benchmarks.generation.trace import SEED, Load, Prompts

PARTS: Final = ("throughput", "schema", "arrivals", "first", "steady", "alone")
#: The schema of completions in part ``schema``: its shortest text has more tokens than any completion here.
SCHEMA: Final = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 30},
            "kind": {"enum": ["animal", "plant", "mineral"]},
            "weight": {"type": "number", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "weight", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of load; the defaults are a full run."""

    seconds: float = 15.0
    #: Minimum number of responses for each connection.
    least: int = 2
    prompt: int = 30
    tokens: int = 64
    concurrencies: tuple[int, ...] = (1, 8, 32)
    #: Mixed lengths: the number of requests, their rate per second, and the tokens of their completions.
    arrivals: int = 96
    rate: float = 8.0
    answers: tuple[int, int] = (8, 128)
    #: Long prompts: their lengths, their number per connection, and the tokens of their completions.
    prompts: tuple[int, int] = (20, 1000)
    each: int = 5
    after_prompt: int = 32
    #: The streams measured while long prompts arrive, and the tokens of each.
    streams: int = 4
    stream_tokens: int = 128

    @classmethod
    def quick(cls) -> Scale:
        """Return a small amount that only checks that all parts work."""
        return cls(
            seconds=1.0, least=1, tokens=16, concurrencies=(1, 4), arrivals=8, rate=8.0, answers=(4, 24),
            prompts=(20, 200), each=1, after_prompt=8, stream_tokens=24,
        )  # fmt: skip


@dataclass(slots=True)
class Question:
    """One or several rows of the table; ``answers`` are by column and figure, for each round."""

    title: str
    part: str
    load: Callable[[Prompts], Load]
    figures: Sequence[Figure]
    #: Only for servers that stream; only for those that take JSON schemas.
    streams: bool = False
    schemas: bool = False
    answers: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def keep(self, column: str, figures: dict[str, float]) -> None:
        """Add the results of a column's round."""
        for name, value in figures.items():
            self.answers.setdefault(column, {}).setdefault(name, []).append(value)


def seed(question: Question, number: int) -> int:
    """Return a unique seed for the prompts of a question in a round."""
    return SEED + 1000 * number + sum(question.title.encode())


def questions(scale: Scale) -> list[Question]:
    """Return all questions."""
    # More than the fastest server needs, at 100 responses per second.
    supply = max(int(100 * scale.seconds), 64)

    def closed(connections: int, schema: str = "") -> Callable[[Prompts], Load]:
        return lambda prompts: Load(
            [replace(ask, schema=schema) for ask in prompts.uniform(supply, scale.prompt, scale.tokens)],
            connections,
            scale.seconds,
            scale.least,
        )

    def arrivals(prompts: Prompts) -> Load:
        return Load(arrivals=prompts.poisson(scale.arrivals, scale.rate, scale.prompt, *scale.answers))

    def first(prompts: Prompts) -> Load:
        connections = scale.concurrencies[1]
        return Load(prompts.mixed(scale.each * connections, *scale.prompts, scale.after_prompt), connections)

    def steady(prompts: Prompts) -> Load:
        asks = prompts.uniform(supply, scale.prompt, scale.stream_tokens)
        long = prompts.uniform(max(int(scale.seconds), 1), scale.prompts[1], 4)
        # The first one arrives while the streams are running.
        moments = [(0.5 + at, ask) for at, ask in enumerate(long)]
        return Load(asks, scale.streams, scale.seconds, scale.least, moments)

    shortest, longest = scale.prompts
    measured = [
        Question(f"{scale.tokens} tokens each, concurrency {many}", "throughput", closed(many), (THROUGHPUT,))
        for many in scale.concurrencies
    ]
    many = scale.concurrencies[1]
    title = f"{scale.tokens} tokens each of JSON with a schema, concurrency {many}"
    measured.append(Question(title, "schema", closed(many, json.dumps(SCHEMA)), (THROUGHPUT,), schemas=True))
    measured.append(
        Question(
            f"{scale.answers[0]} to {scale.answers[1]} tokens, {scale.rate:g} arrivals a second",
            "arrivals",
            arrivals,
            (THROUGHPUT, *LATENCY),
        )
    )
    title = f"prompts of {shortest} to {longest} tokens, concurrency {scale.concurrencies[1]}"
    measured.append(Question(title, "first", first, FIRST))
    title = f"{scale.streams} streams, a prompt of {longest} tokens every second"
    measured.append(Question(title, "steady", steady, GAPS, streams=True))
    return measured
