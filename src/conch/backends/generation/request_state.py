"""The state of a request in a worker, and the interface that builds responses from its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from conch.backends.base.arrays import Request, Result
from conch.backends.generation.engine import Progress
from conch.core.sampling.parameters import SamplingParams
from conch.core.sampling.structures import Structure


class ResponseBuilder(ABC):
    """Builds the responses of one request from its tokens.

    ``prompts`` are the prompts (token ids) with their sampling parameters. Each prompt has ``n`` completions, as its
    parameters specify; the completions of all prompts are numbered consecutively. Used by the service's thread.
    """

    prompts: Sequence[tuple[list[int], SamplingParams]]
    #: The id of other requests that this request ends; they return their tokens so far.
    ends_id: str = ""

    @abstractmethod
    def add(self, index: int, progress: Progress) -> str:
        """Add the result of a step to completion ``index``.

        Returns the finish reason (``stop``, ``length``), empty while the completion continues. A completion may end
        before the engine ends it.
        """

    @abstractmethod
    def responses(self, final: bool) -> Sequence[Result]:
        """Return the responses that are due after a step.

        ``final``: all completions have ended, or the request is ended early. The result then has at least one response.
        """


@dataclass(slots=True, eq=False)
class RequestState:
    """A request that runs on the engine or waits for it.

    ``batch`` is the number of its execution. Lower values of ``priority`` run first; ``order`` is the position among
    requests of equal priority. The first token must arrive before ``deadline``, unless that is 0. Times are monotonic,
    in ns, and 0 for events that have not happened: the server received the request (``arrived``), the worker received
    it (``received``), it was added to the engine (``scheduled``), its first and last token arrived.
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
    #: The completions that have not ended, by the id of their engine request.
    running: dict[int, set[int]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    #: The compiled form of ``structure``.
    compiled: Any = None

    @property
    def finished(self) -> bool:
        return not self.running

    @property
    def structure(self) -> Structure | None:
        """The structure that the output must fit, the same for all prompts of a request; None if there is none."""
        return next((sampling.structured_outputs for _, sampling in self.builder.prompts), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.builder.prompts)

    @property
    def max_tokens(self) -> int:
        return max(sampling.max_tokens for _, sampling in self.builder.prompts)
