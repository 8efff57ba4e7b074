"""Which class serves which task.

A task's module is imported when it is chosen: a text classifier needs no audio library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from conch.backends.tasks.base import OpenEngine, Task, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options

#: ``module:class`` by the name of a pipeline; what is not here goes through ``OTHERS``.
TASKS: Final[dict[str, str]] = {
    "feature-extraction": "encoders.embedding:Embedding",
    "text-classification": "encoders.text_classification:TextClassification",
    "text-ranking": "encoders.rerank:Rerank",
    "zero-shot-classification": "encoders.zero_shot:ZeroShotClassification",
    "token-classification": "encoders.token_classification:TokenClassification",
    "question-answering": "encoders.question_answering:QuestionAnswering",
    "fill-mask": "encoders.fill_mask:FillMask",
    "summarization": "text2text.task:Text2Text",
    "translation": "text2text.task:Text2Text",
    "text2text-generation": "text2text.task:Text2Text",
    "automatic-speech-recognition": "speech:SpeechRecognition",
    "image-classification": "vision:ImageClassification",
}
OTHERS: Final = "pipelines.task:PipelineTask"


def task_class(name: str) -> type[Task]:
    """The class for the task of this name; ``translation_xx_to_yy`` is a translation."""
    if name.startswith("translation_"):
        name = "translation"
    module, _, class_name = TASKS.get(name, OTHERS).partition(":")
    found: type[Task] = getattr(import_module(f"conch.backends.tasks.{module}"), class_name)
    return found


def make_task(checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> Task:
    """The task of a checkpoint, ready to serve.  Raises as the constructor of :class:`Task` does."""
    return task_class(checkpoint.task)(checkpoint, options, open_engine)


def describe_task(checkpoint: Checkpoint, options: Options) -> TaskDescription:
    """The tensors of a checkpoint's task, for a configuration that does not name them."""
    return task_class(checkpoint.task).describe(checkpoint, options)
