"""The tasks: what text, sound or an image becomes; which class serves which.

A task's module is imported when it is chosen: a text classifier needs no audio library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, cast

from conch.backends.tasks.base import Task
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.inference import TensorSpec

#: Loads the network with the head that a task wants, named as transformers names it: ``AutoModel`` ….
OpenEngine = Callable[[str], NetworkEngine]

#: ``module:class`` by the name of a pipeline; what is not here goes through ``OTHERS``.
TASKS: Final[dict[str, str]] = {
    "feature-extraction": "encoders.embedding:Embedding",
    "text-classification": "encoders.text_classification:TextClassification",
    "text-ranking": "encoders.rerank:Rerank",
    "zero-shot-classification": "encoders.zero_shot:ZeroShotClassification",
    "token-classification": "encoders.token_classification:TokenClassification",
    "question-answering": "encoders.question_answering:QuestionAnswering",
    "fill-mask": "encoders.fill_mask:FillMask",
    "summarization": "text2text:Text2Text",
    "translation": "text2text:Text2Text",
    "text2text-generation": "text2text:Text2Text",
    "automatic-speech-recognition": "speech:SpeechRecognition",
    "image-classification": "image:ImageClassification",
}
OTHERS: Final = "generic:Generic"


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """What a task takes and gives, without the batch dimension; known without loading weights."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 256


class Described(Protocol):
    """Whatever says what a task takes and gives: a TaskDescription or a task."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def max_batch_size(self) -> int: ...


class TaskClass(Protocol):
    """What ``TASKS`` names."""

    def __call__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> Task: ...

    def describe(self, checkpoint: Checkpoint, options: Options) -> Described:
        """A class method: the signature, from the checkpoint's small files alone."""


def task_class(name: str) -> TaskClass:
    """The class for the task of this name; ``translation_xx_to_yy`` is a translation."""
    if name.startswith("translation_"):
        name = "translation"
    module, _, found = TASKS.get(name, OTHERS).partition(":")
    imported: Any = import_module(f"conch.backends.tasks.{module}")
    return cast(TaskClass, getattr(imported, found))


def make_task(checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> Task:
    """The task of a checkpoint, ready to serve; ``open_engine`` is called once, by tasks that run an engine.

    Raises INVALID_ARG for a checkpoint that lacks what its task needs, and what ``open_engine`` raises.
    """
    return task_class(checkpoint.task)(checkpoint, options, open_engine)


def describe_task(checkpoint: Checkpoint, options: Options) -> TaskDescription:
    """What the task of a checkpoint takes and gives, for a configuration that does not say it."""
    found = task_class(checkpoint.task).describe(checkpoint, options)
    return TaskDescription(tuple(found.inputs), tuple(found.outputs), found.max_batch_size)
