"""What transformers' pipelines take: the inputs of each task as tensors, and how a row of them becomes a call.

Used by the generic task.  Only decoded sound, decoded images and plain text reach a pipeline: strings that
it could take for an address or a path never do.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.errors import ConchError, invalid
from conch.inference import TensorSpec

_TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
_IMAGE: Final = TensorSpec("image", "BYTES", (1,))
_AUDIO: Final = (
    TensorSpec("audio", "BYTES", (1,), optional=True),
    TensorSpec("samples", "FP32", (-1,), optional=True),
    TensorSpec("sampling_rate", "INT32", (1,), optional=True),
)
_LABELS: Final = TensorSpec("candidate_labels", "BYTES", (-1,))
_QUESTION: Final = TensorSpec("question", "BYTES", (1,))
_ANY_TEXT: Final = TensorSpec("text_input", "BYTES", (1,), optional=True)
_ANY_IMAGE: Final = TensorSpec("image", "BYTES", (1,), optional=True)

#: The inputs by task; what is not here takes text, or what a pipeline of the checkpoint's own says.
_INPUTS: Final[Mapping[str, tuple[TensorSpec, ...]]] = {
    "audio-classification": _AUDIO,
    "zero-shot-audio-classification": (*_AUDIO, _LABELS),
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
    "any-to-any": (_TEXT, _ANY_IMAGE, *_AUDIO),
    "document-question-answering": (_IMAGE, _QUESTION),
    "visual-question-answering": (_IMAGE, _QUESTION),
    "table-question-answering": (TensorSpec("table", "BYTES", (1,)), _QUESTION),
    "video-classification": (TensorSpec("video", "BYTES", (1,)),),
}
#: The inputs of a pipeline that a checkpoint brings along, by the ``type`` that it declares.
_BY_TYPE: Final[Mapping[str, tuple[TensorSpec, ...]]] = {
    "text": (_TEXT,),
    "image": (_IMAGE,),
    "audio": _AUDIO,
    "multimodal": (_ANY_TEXT, _ANY_IMAGE, *_AUDIO),
}
OPTIONS: Final = TensorSpec("options", "BYTES", (1,), optional=True)

#: Modules beside those of the pipelines.
_NO_TASKS: Final = frozenset({"__init__", "audio_utils", "base", "pt_utils"})

#: Arguments that pipelines take without naming them in a signature.
_UNNAMED: Final[Mapping[str, frozenset[str]]] = {
    "image-segmentation": frozenset({"subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold"}),
    "object-detection": frozenset({"threshold"}),
    "zero-shot-object-detection": frozenset({"threshold", "top_k"}),
    "zero-shot-image-classification": frozenset({"hypothesis_template"}),
    "zero-shot-audio-classification": frozenset({"hypothesis_template"}),
    "mask-generation": frozenset({
        "points_per_batch", "points_per_crop", "crops_n_layers", "crop_overlap_ratio", "mask_threshold",
        "crop_n_points_downscale_factor", "pred_iou_thresh", "stability_score_offset", "stability_score_thresh",
        "crops_nms_thresh", "output_rle_mask", "output_bboxes_mask",
    }),
}  # fmt: skip
#: Arguments that are not for clients: other models and code, tensors, addresses, and how the work is run.
_REFUSED: Final = frozenset({
    "assistant_model", "assistant_tokenizer", "batch_size", "custom_generate", "device", "generation_config", "model",
    "num_workers", "processor_kwargs", "return_tensors", "self", "streamer", "timeout", "tokenizer",
    "tokenizer_encode_kwargs", "trust_remote_code", "preprocess_params", "word_boxes",
})  # fmt: skip


def inputs_of(task: str, config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The tensors of a task, with ``options`` last; ``config`` is the checkpoint's, which may bring a pipeline."""
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


def own_pipeline(task: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The name and the declaration of the pipeline for ``task`` that a checkpoint brings along."""
    for name, declared in (config.get("custom_pipelines") or {}).items():
        if name.lower().replace("_", "-") == task.lower().replace("_", "-"):
            return name, declared
    return None


def arguments(pipeline: Any, task: str, text: str, row: int) -> dict[str, Any]:
    """The call arguments in the input ``options``, a JSON object.

    Those that the pipeline names, and parameters of ``generate`` where it generates; anything that could load
    code, a model or an address is refused.  Raises INVALID_ARG, naming the argument.
    """
    try:
        given = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise invalid(f"input 'options' in row {row} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise invalid(f"input 'options' in row {row} must be a JSON object")
    generation = _generation_parameters() if getattr(pipeline, "_pipeline_calls_generate", False) else frozenset()
    named = frozenset(inspect.signature(pipeline._sanitize_parameters).parameters) - {"kwargs"}
    known = (named | _UNNAMED.get(task, frozenset()) | generation) - _REFUSED
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, known)
        if name in ("generate_kwargs", "forward_params"):
            if not isinstance(value, dict):
                raise invalid(f"argument '{name}' of input 'options' must be a JSON object")
            for inner in value:
                if inner not in _generation_parameters() - _REFUSED:
                    raise _unknown(inner, _generation_parameters() - _REFUSED)
        elif name.endswith("_kwargs"):
            raise _unknown(name, known)
    return given


def _generation_parameters() -> frozenset[str]:
    import transformers

    empty: Any = transformers.GenerationConfig
    return frozenset(name for name in vars(empty()) if not name.startswith("_"))


def _unknown(name: str, known: frozenset[str]) -> ConchError:
    some = sorted(known)
    return invalid(
        f"argument '{name}' of input 'options' cannot be given; those that can are: "
        f"{', '.join(some[:40])}{' ...' if len(some) > 40 else ''}"
    )


def call(pipeline: Any, task: str, row: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Call a pipeline with one decoded row: text and questions as ``str``, images of Pillow, sound as an array."""
    match task:
        case "zero-shot-audio-classification":
            return pipeline(row["audio"], candidate_labels=row["candidate_labels"], **given)
        case "zero-shot-image-classification" | "zero-shot-object-detection":
            return pipeline(row["image"], candidate_labels=row["candidate_labels"], **given)
        case "document-question-answering" | "visual-question-answering":
            return pipeline(image=row["image"], question=row["question"], **given)
        case "table-question-answering":
            return pipeline(table=row["table"], query=row["question"], **given)
        case "image-text-to-text" | "image-to-text" | "any-to-any" if "text_input" in row:
            return _multimodal(pipeline, row, given)
        case "decision":
            return pipeline(_decision(row["text_input"]), **given)
    values = [row[name] for name in ("text_input", "image", "audio", "video") if name in row]
    return pipeline(values[0] if len(values) == 1 else values, **given)


def _multimodal(pipeline: Any, row: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """As a chat of one message where the checkpoint has a template for chats, else as the pipeline takes it."""
    media = [name for name in ("image", "audio") if name in row]
    if getattr(pipeline.processor, "chat_template", None):
        content = [{"type": name, name: row[name]} for name in media]
        message = {"role": "user", "content": [*content, {"type": "text", "text": row["text_input"]}]}
        return pipeline(text=[message], **{"return_full_text": False, **given})
    named = {"images" if name == "image" else name: row[name] for name in media}
    return pipeline(text=row["text_input"], **named, **given)


def _decision(text: str) -> dict[str, Any]:
    try:
        request = json.loads(text)
    except ValueError as error:
        raise invalid(f"input 'text_input' must be a JSON object with 'state' and 'questions': {error}") from None
    if not isinstance(request, dict) or "assets" in request:
        raise invalid("input 'text_input' must be a JSON object with 'state' and 'questions', without 'assets'")
    return request
