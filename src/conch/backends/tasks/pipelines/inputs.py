"""Which tensors the pipelines of transformers take, by task, and which tasks there are pipelines for.

Imports no part of transformers, so that a model's tensors are known at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conch import extras
from conch.backends.tasks import media
from conch.backends.tasks.media import SOUND_INPUTS
from conch.errors import invalid
from conch.inference import TensorSpec

_TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
_IMAGE: Final = TensorSpec("image", "BYTES", (1,))
_LABELS: Final = TensorSpec("candidate_labels", "BYTES", (-1,))
_QUESTION: Final = TensorSpec("question", "BYTES", (1,))
_ANY_TEXT: Final = TensorSpec("text_input", "BYTES", (1,), optional=True)
_ANY_IMAGE: Final = TensorSpec("image", "BYTES", (1,), optional=True)

#: The inputs by task; what is not here takes text, or what a pipeline of the checkpoint's own says.
_INPUTS: Final[Mapping[str, tuple[TensorSpec, ...]]] = {
    "audio-classification": SOUND_INPUTS,
    "zero-shot-audio-classification": (*SOUND_INPUTS, _LABELS),
    "depth-estimation": (_IMAGE,),
    "image-feature-extraction": (_IMAGE,),
    "image-segmentation": (_IMAGE,),
    "image-to-image": (_IMAGE,),
    "mask-generation": (_IMAGE,),
    "object-detection": (_IMAGE,),
    "keypoint-matching": (TensorSpec("image", "BYTES", (2,)),),
    "zero-shot-image-classification": (_IMAGE, _LABELS),
    "zero-shot-object-detection": (_IMAGE, _LABELS),
    "image-to-text": (_IMAGE, _ANY_TEXT),
    "image-text-to-text": (_IMAGE, _TEXT),
    "any-to-any": (_TEXT, _ANY_IMAGE, *SOUND_INPUTS),
    "document-question-answering": (_IMAGE, _QUESTION),
    "visual-question-answering": (_IMAGE, _QUESTION),
    "table-question-answering": (TensorSpec("table", "BYTES", (1,)), _QUESTION),
    "video-classification": (TensorSpec("video", "BYTES", (1,)),),
}
#: The inputs of a pipeline that a checkpoint brings along, by the ``type`` that it declares.
_BY_TYPE: Final[Mapping[str, tuple[TensorSpec, ...]]] = {
    "text": (_TEXT,),
    "image": (_IMAGE,),
    "audio": SOUND_INPUTS,
    "multimodal": (_ANY_TEXT, _ANY_IMAGE, *SOUND_INPUTS),
}
OPTIONS: Final = TensorSpec("options", "BYTES", (1,), optional=True)

#: Tasks of pipelines that read or write sound with every request.
_SOUND: Final = frozenset({"audio-classification", "zero-shot-audio-classification", "text-to-audio", "text-to-speech"})

#: Modules beside those of the pipelines.
_NO_TASKS: Final = frozenset({"__init__", "audio_utils", "base", "pt_utils"})


def inputs_of(task: str, config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The inputs of a task, ``options`` last; ``config`` is config.json, which may declare a pipeline of its own."""
    own = own_pipeline(task, config)
    if task in _INPUTS or own is None:
        return (*_INPUTS.get(task, (_TEXT,)), OPTIONS)
    return (*_BY_TYPE.get(str(own[1].get("type")), (_TEXT,)), OPTIONS)


def check_task(task: str, config: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG for a task that neither transformers nor the checkpoint has a pipeline for.

    Told from the names of transformers' files, as importing it takes seconds; where it is not installed, all pass.
    """
    found = importlib.util.find_spec("transformers")
    folders = found.submodule_search_locations if found is not None else None
    files = {path.stem for folder in folders or () for path in Path(folder, "pipelines").glob("*.py")}
    if files and task.replace("-", "_") not in files and own_pipeline(task, config) is None:
        known = sorted(name.replace("_", "-") for name in files - _NO_TASKS)
        raise invalid(f"task '{task}' is not known; the tasks of transformers' pipelines are: {', '.join(known)}")


def require_libraries(task: str, inputs: Sequence[TensorSpec]) -> None:
    """Raise UNSUPPORTED unless the libraries for each request's ``inputs`` are there, which transformers itself misses
    with the first request only."""
    if any(spec.name == "image" and not spec.optional for spec in inputs):
        media.require_images(task)
    if task in _SOUND:
        media.require_sound(task)
    if any(spec.name == "table" for spec in inputs):
        extras.require(f"task '{task}'", "pandas")


def own_pipeline(task: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The name and the declaration of the pipeline for ``task`` that a checkpoint brings along."""
    for name, declared in (config.get("custom_pipelines") or {}).items():
        if name.lower().replace("_", "-") == task.lower().replace("_", "-"):
            return name, declared
    return None
