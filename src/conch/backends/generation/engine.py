"""What an engine is: it is given sequences, and at every step says which tokens they got.

One thread, the engine's, makes every call, so that no engine needs locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from conch.errors import ConchError
from conch.sampling.parameters import Feature, SamplingParams


@dataclass(slots=True)
class EngineRequest:
    """A prompt to be continued; ``id`` is the caller's, unique among an engine's sequences that have not ended."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    #: Lower goes first where not all fit; sequences of the same priority go in the order in which they came.
    priority: int = 0


@dataclass(slots=True)
class TokenLogprobs:
    """Of one position: the log-probability (natural) and rank (1 is the likeliest; 0 unknown) of the chosen token, and
    of the likeliest ones, best first, as (token, log-probability)."""

    logprob: float
    rank: int = 0
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """What a step did for a sequence.

    ``tokens`` are new; with beam search there is nothing before the end, and then one object for each beam, best
    first, with all of its tokens.  ``finish`` is empty while the sequence goes on, else ``stop`` (an end-of-sequence or
    stop token, which is among ``tokens``) or ``length``; with beams it is set on every one of them.  ``error`` ends the
    sequence as well.
    """

    id: int
    tokens: Sequence[int] = ()
    finish: str = ""
    error: ConchError | None = None
    logprobs: list[TokenLogprobs] | None = None
    beam: int = 0
    #: Sum of the log-probabilities of all tokens of a beam.
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class EngineUsage:
    """What an engine has under way.

    ``running`` sequences are in the batch, ``waiting`` ones are not yet (or not any more, for want of cache).
    ``used_tokens`` is what they take of the KV cache, cached prefixes that nobody uses excluded.
    ``prefix_queries`` and ``prefix_hits`` are totals over the engine's life (tokens), ``preemptions`` of sequences.
    """

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class GenerationEngine(ABC):
    """A network with its KV cache and its batch.

    ``context`` is the most tokens that a sequence may have with its prompt, ``max_sequences`` how many run at a time,
    ``cache_tokens`` what the KV cache holds (0: it grows as needed), ``block_tokens`` the unit in which it is given
    out.  ``vocabulary`` is the number of token ids that the network knows.
    """

    name: ClassVar[str]
    features: frozenset[Feature] = frozenset()
    context: int
    max_sequences: int
    vocabulary: int
    cache_tokens: int = 0
    block_tokens: int = 1
    #: Names of LoRA adapters that ``SamplingParams.lora_name`` may give.
    adapters: tuple[str, ...] = ()

    @abstractmethod
    def add(self, sequence: EngineRequest) -> None:
        """Take a sequence; its first tokens come from a later step.

        The caller has checked features, adapter names and lengths.  Raises ConchError for what only the engine can
        know to be wrong (a grammar that does not compile: INVALID_ARG); nothing is kept then.
        """

    @abstractmethod
    def step(self) -> list[Progress]:
        """Compute one step for whatever is there; returns at once, with nothing, when there is nothing.

        What is raised means that the engine is broken: the worker fails its requests and ends.
        """

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Forget a sequence and free what it holds, with the next step at the latest; an unknown ``id`` has no effect.

        Nothing is reported of it any more.
        """

    @abstractmethod
    def load(self) -> EngineUsage:
        """What is under way, as cheaply as it can be had: it is asked after every step."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a step has anything to do."""

    def close(self) -> None:  # noqa: B027 (most have nothing to give back but memory)
        """Give everything back; nothing is under way any more."""
