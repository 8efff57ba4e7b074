"""A request with the worker, and what makes responses of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from conch.backends.base.arrays import Request, Result
from conch.backends.generation.engine import Progress
from conch.sampling.parameters import SamplingParams
from conch.sampling.structures import Structure


class ResponseBuilder(ABC):
    """Turns the tokens of one request into its responses.

    ``prompts`` are the sequences to continue: token ids, and how.  A sequence has as many continuations as the ``n`` of
    its parameters; those of all sequences are numbered through.  Used by the service's thread.
    """

    prompts: Sequence[tuple[list[int], SamplingParams]]
    #: The id of other requests, which this one ends with what they have.
    ends_id: str = ""

    @abstractmethod
    def add(self, index: int, progress: Progress) -> str:
        """Add what a step brought to continuation ``index``.

        Returns how the continuation has ended (``stop``, ``length``), empty while it goes on; it may end before the
        engine says so.
        """

    @abstractmethod
    def responses(self, final: bool) -> Sequence[Result]:
        """The responses that are due after a step.

        ``final`` says that all continuations have ended, or that the request is not to go on; then there is at least
        one response.
        """


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that runs on the engine, or waits for room there.

    ``batch`` is the number of its execution.  Lower numbers of ``priority`` are more important, ``order`` is the place
    among requests of one priority.  The first token has to come before ``deadline``, if there is one.  Times are
    monotonic, in ns, and 0 for what has not happened: when the server got the request (``arrived``) and the worker
    (``received``), when it went to the engine (``scheduled``), and when tokens came.
    """

    request: Request
    batch: int
    builder: ResponseBuilder
    arrived: int
    priority: int = 0
    deadline: int = 0
    order: int = 0
    received: int = field(default_factory=monotonic_ns)
    scheduled: int = 0
    first_token: int = 0
    last_token: int = 0
    generated_tokens: int = 0
    #: By the engine's request under way: the continuations that have not ended.
    running: dict[int, set[int]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    #: What the engine has made of the structure that the output must fit.
    compiled: Any = None

    @property
    def finished(self) -> bool:
        return not self.running

    @property
    def structure(self) -> Structure | None:
        """What the output must fit; the sequences of a request have it in common."""
        return next((sampling.structured_outputs for _, sampling in self.builder.prompts), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.builder.prompts)

    @property
    def max_tokens(self) -> int:
        return max(sampling.max_tokens for _, sampling in self.builder.prompts)
