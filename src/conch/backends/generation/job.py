"""A request that is being generated, and what an interface makes of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from conch.backends.generation.engine import Progress
from conch.backends.native.arrays import Request, Result
from conch.sampling.parameters import SamplingParams


class ResponseBuilder(ABC):
    """Turns the tokens of one request into its responses.

    ``prompts`` are the sequences that the request wants continued, token ids and how; a sequence has as many
    continuations as its ``SamplingParams.n``, which are numbered through.  Used by the thread that runs the engine.
    """

    prompts: Sequence[tuple[list[int], SamplingParams]]
    #: The id of requests that this one ends with what they have.
    stops: str = ""

    @abstractmethod
    def take(self, index: int, progress: Progress) -> str:
        """Take what a step brought for a continuation.

        Returns how it has ended (``stop``, ``length``), empty while it goes on; it may end before the engine says so.
        """

    @abstractmethod
    def responses(self, final: bool) -> Sequence[Result]:
        """What goes out after this step, at least one where it is ``final``: be it that all continuations have ended,
        or that the request is not to go on."""


@dataclass(slots=True, eq=False)
class Job:
    """A request with the engine, or waiting for room there.

    ``batch`` is the number of its execution, ``arrived`` when the server got it (ns, monotonic), ``priority`` lower
    the more important; with a ``deadline`` its first token must come before.
    """

    request: Request
    batch: int
    reply: ResponseBuilder
    arrived: int
    priority: int = 0
    deadline: int = 0
    order: int = 0
    taken: int = field(default_factory=monotonic_ns)
    added: int = 0
    first: int = 0
    last: int = 0
    generated: int = 0
    #: The engine's sequences under way, and the continuations of each that have not ended.
    running: dict[int, set[int]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return not self.running

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.reply.prompts)

    @property
    def max_tokens(self) -> int:
        return max(sampling.max_tokens for _, sampling in self.reply.prompts)
