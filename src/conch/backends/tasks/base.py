"""What a task is: tensors in, tensors out, and the two halves of answering a request.

A task is used by the threads of a worker: ``prepare`` by whichever thread received the request, while
others compute; ``execute`` by the threads of the instances.  Both must be safe to call from several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from conch.backends.native.arrays import Request, Result
from conch.errors import ConchError
from conch.inference import TensorSpec


class Prepared:
    """A request that is ready to be computed; tasks make subclasses that hold what they need.

    ``length`` is that of its longest sequence and ``sequences`` their number, in whatever costs time:
    tokens for text, frames for audio, 1 for images.  The server's scheduler groups by them.
    """

    __slots__ = ("length", "request", "sequences")

    def __init__(self, request: Request, length: int = 1, sequences: int = 1) -> None:
        self.request = request
        self.length = length
        self.sequences = sequences


@dataclass(slots=True)
class ExecutionWork:
    """What one execution computed: real tokens, tokens with padding, sequences, runs of the engine.

    ``prepare_ns`` is the time that its worker took to prepare requests since the last one.
    """

    tokens: int = 0
    padded: int = 0
    sequences: int = 0
    runs: int = 0
    prepare_ns: int = 0

    def add(self, tokens: int, padded: int, sequences: int) -> None:
        """Count one run of the engine."""
        self.tokens += tokens
        self.padded += padded
        self.sequences += sequences
        self.runs += 1


class Task(ABC):
    """One task over one checkpoint.

    ``inputs`` and ``outputs`` are without the batch dimension.  ``max_batch_size`` is what a
    configuration without one gets.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int = 256

    @abstractmethod
    def prepare(self, request: Request) -> Prepared:
        """Check and decode a request: tokenise text, decode audio or an image.  Raises INVALID_ARG."""

    @abstractmethod
    def execute(self, batch: Sequence[Prepared], usage: ExecutionWork) -> list[Result | ConchError]:
        """Answer each of ``batch``, in order, with the outputs its request wants.

        What is wrong with one request is returned for it; what is raised fails them all.
        """
