"""What a task is: the tensors that it takes and gives, and the two halves of answering a request.

Threads of a worker call both at once: ``prepare`` is called by whichever thread received the request, while others
compute, and ``execute`` by the threads of the instances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conch.backends.base.arrays import Request, Result
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, internal, invalid, one_line
from conch.inference import TensorSpec


class PreparedRequest:
    """A request that is ready to be computed; tasks make subclasses that hold what they need.

    ``length`` is that of its longest sequence, in whatever costs time: tokens for text, frames for sound, 1 for images.
    The server's scheduler groups requests by it and by ``sequence_count``.
    """

    __slots__ = ("length", "request", "sequence_count")

    def __init__(self, request: Request, length: int = 1, sequence_count: int = 1) -> None:
        self.request = request
        self.length = length
        self.sequence_count = sequence_count


@dataclass
class ExecutionWork:
    """The work of one execution: real tokens, tokens with padding, sequences, runs of the engine.

    ``prepare_ns`` is the time that its worker took to prepare requests since the last one, ``waited_ns`` the part of it
    that was within this execution.  ``arrange_ns``, ``engine_ns`` and ``answer_ns`` are what it took to divide and pad
    sequences, in the network, and to make answers of its outputs.
    """

    tokens: int = 0
    padded: int = 0
    sequences: int = 0
    runs: int = 0
    prepare_ns: int = 0
    waited_ns: int = 0
    arrange_ns: int = 0
    engine_ns: int = 0
    answer_ns: int = 0

    def add(self, tokens: int, padded: int, sequences: int) -> None:
        """Count one run of the engine."""
        self.tokens += tokens
        self.padded += padded
        self.sequences += sequences
        self.runs += 1


def library_failure(what: str, error: Exception, *, of_request: bool = False) -> ConchError:
    """The error for a request in which a library raised ``error``: INVALID_ARG for a ValueError, else INTERNAL.

    ``of_request``: whatever was raised, the request is to blame.
    """
    kind = invalid if of_request or isinstance(error, ValueError) else internal
    return kind(f"{what} failed: {one_line(error)}")


#: Loads the network under a class of transformers' (``AutoModel`` …), which decides its head.
OpenEngine = Callable[[str], NetworkEngine]


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """The tensors of a task over one checkpoint, without the batch dimension.

    ``max_batch_size`` is what a configuration without one gets; 0 for tasks without a batch dimension.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 256


class Task(ABC):
    """One task over one checkpoint."""

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        """Load what the task needs; ``open_engine`` is called once, by tasks whose network an engine runs.

        Raises INVALID_ARG for a checkpoint that lacks what the task needs, and what ``open_engine`` raises.
        """

    @classmethod
    @abstractmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        """The tensors, from the checkpoint's small files alone.

        Raises INVALID_ARG for options that no request could be answered with.
        """

    @property
    def limits(self) -> dict[str, int | str]:
        """What a run and a sequence may have, by name; for whoever looks after the server."""
        return {}

    @abstractmethod
    def prepare(self, request: Request) -> PreparedRequest:
        """Check and decode a request: tokenise text, decode audio or an image.  Raises INVALID_ARG."""

    @abstractmethod
    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        """Answer each of ``batch``, in order, with the outputs its request wants.

        What is wrong with one request is returned for it; what is raised fails them all.
        """
