"""The base class of tasks: a task has tensors and processes a request in two steps, ``prepare`` and ``execute``.

The steps of different requests run concurrently: the thread that receives a request calls ``prepare``, the threads of
the instances call ``execute``. ``complete_config`` adds the tensors of a task to a configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conch.backends.base.arrays import Request, Result
from conch.backends.tasks.engines import NetworkEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import ConchError, internal, invalid, one_line, unsupported
from conch.core.inference import TensorSpec
from conch.core.tensors import CONFIG_NAME, format_shape


class PreparedRequest:
    """A decoded request that is ready to run; tasks subclass it to store their inputs.

    ``length`` is the length of its longest sequence: tokens for text, frames for audio, 1 for images. The server's
    scheduler groups requests by ``length`` and ``sequence_count``.
    """

    __slots__ = ("length", "request", "sequence_count")

    def __init__(self, request: Request, length: int = 1, sequence_count: int = 1) -> None:
        self.request = request
        self.length = length
        self.sequence_count = sequence_count

    @property
    def token_counts(self) -> list[int] | None:
        """The number of tokens of each row, None for inputs other than texts."""
        return None


def _never() -> bool:
    return False


@dataclass
class ExecutionWork:
    """Counts and times of one execution: tokens without and with padding, sequences, and runs of the engine.

    Times are in nanoseconds. ``prepare_ns`` is the time that the worker spent preparing requests since the last
    execution; ``waited_ns`` is the part of it that delayed this execution. ``arrange_ns`` is spent dividing and padding
    sequences, ``engine_ns`` in the network, and ``answer_ns`` converting its outputs to responses.

    ``others_wait`` tells whether requests wait for the end of this execution. It should then end soon, with results
    ``UNFINISHED`` if need be.
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
    others_wait: Callable[[], bool] = _never

    @property
    def counts(self) -> dict[str, int]:
        """The counts and times by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    def add(self, tokens: int, padded: int, sequences: int) -> None:
        """Count one run of the engine."""
        self.tokens += tokens
        self.padded += padded
        self.sequences += sequences
        self.runs += 1


def library_failure(label: str, error: Exception, *, of_request: bool = False) -> ConchError:
    """Return the error of a request during which a library raised ``error``.

    INVALID_ARG for a ValueError or with ``of_request`` (the request caused the error); otherwise INTERNAL.
    """
    kind = invalid if of_request or isinstance(error, ValueError) else internal
    return kind(f"{label} failed: {one_line(error)}")


#: Loads the network with a class of transformers (``AutoModel`` …); the class determines the head. Embeddings also give
#: ``part``, the checkpoint in a subfolder that has the network, and settings of ``engines.open_engine``.
OpenEngine = Callable[..., NetworkEngine]


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """The tensors of a task over one checkpoint, without the batch dimension.

    ``max_batch_size`` is the default for configurations without one; 0 for tasks without a batch dimension.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 256


class Task(ABC):
    """One task over one checkpoint."""

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        """Load the task. Tasks whose network runs in an engine call ``open_engine`` once.

        Raises INVALID_ARG for a checkpoint that lacks files or weights of the task, and the errors of ``open_engine``.
        """

    @classmethod
    @abstractmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        """Describe the tensors without reading weights.

        Raises INVALID_ARG for options that would make every request fail.
        """

    @classmethod
    def has_network(cls, checkpoint: Checkpoint) -> bool:
        """Whether the task of ``checkpoint`` runs a network."""
        return True

    @property
    def limits(self) -> dict[str, int | str]:
        """The limits of a run and of a sequence by name, reported as runtime facts."""
        return {}

    @property
    def runtime_facts(self) -> dict[str, str]:
        """Other facts about the task by name; they replace those of the engine."""
        return {}

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the texts. Raises UNSUPPORTED for a task without one."""
        raise unsupported("this task has no tokenizer")

    def prompt_of(self, request: Request) -> str:
        """Return the prompt before the texts of a request; raises INVALID_ARG for a name that does not exist."""
        return ""

    @abstractmethod
    def prepare(self, request: Request) -> PreparedRequest:
        """Check and decode a request: tokenise text, decode audio or an image. Raises INVALID_ARG."""

    @abstractmethod
    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        """Run ``batch`` and return the requested outputs of each request, in order.

        The error of a single request is returned in its place; a raised error fails the whole batch. A request whose
        result is ``UNFINISHED`` is part of a later batch and continues there.
        """


def complete_config(config: Mapping[str, Any], task: TaskDescription) -> dict[str, Any]:
    """Add missing tensors, maximum batch size and dynamic batching to ``config`` (JSON).

    Raises INVALID_ARG for configured tensors that do not match those of the task.
    """
    completed = dict(config)
    completed["input"] = _tensors(config, "input", task.inputs)
    completed["output"] = _tensors(config, "output", task.outputs)
    completed["max_batch_size"] = int(config.get("max_batch_size") or task.max_batch_size)
    scheduled = any(choice in config for choice in ("dynamic_batching", "sequence_batching", "ensemble_scheduling"))
    if completed["max_batch_size"] > 1 and not scheduled:
        completed["dynamic_batching"] = {}
    return completed


def _tensors(config: Mapping[str, Any], kind: str, specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    written = config.get(kind) or []
    if not written:
        return list(map(config_tensor, specs))
    name = config.get("name", "")
    known = {spec.name: spec for spec in specs}
    for tensor in written:
        spec = known.get(tensor["name"])
        if spec is None:
            raise invalid(
                f"model '{name}', unexpected inference {kind} '{tensor['name']}', its task has: {', '.join(known)}"
            )
        if tensor.get("data_type") != CONFIG_NAME[spec.datatype]:
            raise invalid(
                f"model '{name}', {kind} '{spec.name}' is {tensor.get('data_type')} in the configuration, but "
                f"{CONFIG_NAME[spec.datatype]} in its task"
            )
        dims = [int(dim) for dim in (tensor["reshape"].get("shape", ()) if "reshape" in tensor else tensor["dims"])]
        if len(dims) != len(spec.dims) or any(
            -1 not in (dim, own) and dim != own for dim, own in zip(dims, spec.dims, strict=True)
        ):
            raise invalid(
                f"model '{name}', {kind} '{spec.name}' has dims {format_shape(dims)} in the configuration, but "
                f"{format_shape(spec.dims)} in its task"
            )
    missing = [
        spec.name
        for spec in specs
        if kind == "input" and not spec.optional and spec.name not in {tensor["name"] for tensor in written}
    ]
    if missing:
        raise invalid(f"model '{name}', the configuration lacks the input '{missing[0]}' of its task")
    return list(written)


def config_tensor(spec: TensorSpec) -> dict[str, Any]:
    """Return the description of a tensor for a configuration (JSON object)."""
    tensor: dict[str, Any] = {"name": spec.name, "data_type": CONFIG_NAME[spec.datatype], "dims": list(spec.dims)}
    return {**tensor, "optional": True} if spec.optional else tensor
