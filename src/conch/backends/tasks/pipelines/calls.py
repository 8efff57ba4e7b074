"""How a decoded row becomes a call of a transformers pipeline, and which arguments a client may add.

Only decoded sound, decoded images and plain text reach a pipeline: strings that it could take for an address or a path
never do.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

from conch.backends.tasks.hypotheses import check_template
from conch.errors import ConchError, invalid

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
#: Arguments that are not for clients: other models and code, tensors, addresses, words of a program's command line, and
#: how the work is run.
_REFUSED: Final = frozenset({
    "assistant_model", "assistant_tokenizer", "batch_size", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "custom_generate", "device", "disable_compile", "generation_config", "lang",
    "max_cache_len", "model", "num_workers", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "prefill_chunk_size", "preprocess_params", "processor_kwargs", "return_dict_in_generate",
    "return_tensors", "self", "streamer", "tesseract_config", "timeout", "tokenizer", "tokenizer_encode_kwargs",
    "trust_remote_code", "word_boxes",
})  # fmt: skip
#: The greatest value of arguments that say how much is computed or kept at a time, and of all others.
_GREATEST: Final[Mapping[str, int]] = {
    "crops_n_layers": 4,  # each has four times as many crops as the one before
    "max_length": 1 << 16,
    "max_new_tokens": 1 << 16,
    "min_length": 1 << 16,
    "min_new_tokens": 1 << 16,
    "num_assistant_tokens": 1 << 10,
    "num_beam_groups": 32,
    "num_beams": 32,
    "num_frames": 1 << 10,
    "num_return_sequences": 64,
    "points_per_batch": 1 << 10,
    "points_per_crop": 128,  # on each side
    "prompt_lookup_num_tokens": 1 << 10,
}
_ANY_GREATEST: Final = 1 << 20
#: The most characters of an input ``options``.
_MAX_OPTIONS: Final = 1 << 16


def arguments(pipeline: Any, task: str, text: str, row: int) -> dict[str, Any]:
    """The call arguments in the input ``options``, a JSON object.

    Those that the pipeline names, and parameters of ``generate`` where it generates; anything that could load
    code, a model or an address is refused.  Raises INVALID_ARG, naming the argument.
    """
    if len(text) > _MAX_OPTIONS:
        raise invalid(f"input 'options' in row {row} has {len(text)} characters; at most {_MAX_OPTIONS} are read")
    try:
        given = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
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
            for inner, number in value.items():
                _check_amount(inner, number)
        elif name.endswith("_kwargs"):
            raise _unknown(name, known)
        elif name == "hypothesis_template":
            check_template(value, formatted=True)
        else:
            _check_amount(name, value)
    return given


def _check_amount(name: str, value: Any) -> None:
    """Raise INVALID_ARG for a number that asks for more than a request can mean."""
    greatest = _GREATEST.get(name, _ANY_GREATEST)
    if isinstance(value, int | float) and not abs(value) <= greatest:
        raise invalid(f"argument '{name}' of input 'options' is {value}; it must be {greatest} at most")


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
