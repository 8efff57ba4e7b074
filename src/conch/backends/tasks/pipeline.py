"""Serves the tasks of ``transformers.pipeline`` that have no separate module.

Rows are decoded on arrival and passed to the pipeline one by one. Strings of clients reach a pipeline only as text
inputs, never in place of media, which it could open as a URL or a path: audio and images are decoded first, and a video
is the path of a temporary file. Describing a task does not import transformers, which takes seconds.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from threading import local
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.tasks import media
from conch.backends.tasks.classification import check_labels, check_template, max_labels
from conch.backends.tasks.media import SOUND_INPUTS
from conch.backends.tasks.task import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.transformers import device_of, load_pipeline, require_pipeline_tensors
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError, cancelled, invalid
from conch.core.inference import TensorSpec
from conch.machine import extras
from conch.machine.temporary import TemporaryFolder

#: The members that hold the text in a pipeline's result.
_TEXTS: Final = ("generated_text", "answer", "text", "summary_text", "translation_text")


def text_of(output: Any) -> str:
    """Return the text of a result that is a single text, else the result as JSON.

    In JSON, an image is a PNG file in base64, audio with a ``sampling_rate`` a WAV file in base64, and any other array
    a list.
    """
    only = output[0] if isinstance(output, list) and len(output) == 1 else output
    if isinstance(only, str):
        return only
    if isinstance(only, Mapping):
        texts = [only[name] for name in _TEXTS if isinstance(only.get(name), str)]
        if texts:
            return str(texts[0])
    return json.dumps(_plain(output), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert a pipeline's result to JSON types."""
    if isinstance(value, Mapping):
        if "sampling_rate" in value and isinstance(value.get("audio"), np.ndarray):
            rate = int(value["sampling_rate"])
            return {"audio": b64encode(media.wav(value["audio"], rate)).decode(), "sampling_rate": rate}
        return {str(name): _plain(element) for name, element in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(element) for element in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "save") and hasattr(value, "convert"):
        return b64encode(media.png(value)).decode()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


#: Arguments of pipelines that are not in a signature.
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
#: Arguments that clients may not set: models and code, tensors, URLs, command-line arguments, and execution settings.
_REFUSED: Final = frozenset({
    "assistant_model", "assistant_tokenizer", "batch_size", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "custom_generate", "device", "disable_compile", "generation_config", "lang",
    "max_cache_len", "model", "num_workers", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "prefill_chunk_size", "preprocess_params", "processor_kwargs", "return_dict_in_generate",
    "return_tensors", "self", "streamer", "tesseract_config", "timeout", "tokenizer", "tokenizer_encode_kwargs",
    "trust_remote_code", "word_boxes",
})  # fmt: skip
#: Maximum values of arguments that determine the amount of computation or memory, and of all other arguments.
_GREATEST: Final[Mapping[str, int]] = {
    "crops_n_layers": 4,  # each layer has four times as many crops as the previous one
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
#: The maximum number of characters in the input ``options``.
_MAX_OPTIONS: Final = 1 << 16


def arguments(pipeline: Any, task: str, text: str, row: int) -> dict[str, Any]:
    """Parse the call arguments in the input ``options``, a JSON object.

    Allowed are the pipeline's own arguments and, if it generates, the parameters of ``generate``. Arguments that could
    load code, a model or a URL are rejected. Raises INVALID_ARG, naming the argument.
    """
    if len(text) > _MAX_OPTIONS:
        raise invalid(f"input 'options' in row {row} has {len(text)} characters; at most {_MAX_OPTIONS} are read")
    try:
        options = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid(f"input 'options' in row {row} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise invalid(f"input 'options' in row {row} must be a JSON object")
    generation = _generation_parameters() if getattr(pipeline, "_pipeline_calls_generate", False) else frozenset()
    named = frozenset(inspect.signature(pipeline._sanitize_parameters).parameters) - {"kwargs"}
    known = (named | _UNNAMED.get(task, frozenset()) | generation) - _REFUSED
    for name, value in options.items():
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
    return options


def _check_amount(name: str, value: Any) -> None:
    """Raise INVALID_ARG for a number above the maximum of its argument."""
    greatest = _GREATEST.get(name, _ANY_GREATEST)
    if isinstance(value, int | float) and not abs(value) <= greatest:
        raise invalid(f"argument '{name}' of input 'options' is {value}; it must be at most {greatest}")


def _generation_parameters() -> frozenset[str]:
    import transformers

    empty: Any = transformers.GenerationConfig
    return frozenset(name for name in vars(empty()) if not name.startswith("_"))


def _unknown(name: str, known: frozenset[str]) -> ConchError:
    some = sorted(known)
    return invalid(
        f"argument '{name}' of input 'options' is not allowed; the allowed arguments are: "
        f"{', '.join(some[:40])}{' ...' if len(some) > 40 else ''}"
    )


def call(pipeline: Any, task: str, row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a pipeline with one decoded row: texts as ``str``, images as Pillow images, audio as an array."""
    match task:
        case "zero-shot-audio-classification":
            return pipeline(row["audio"], candidate_labels=row["candidate_labels"], **options)
        case "zero-shot-image-classification" | "zero-shot-object-detection":
            return pipeline(row["image"], candidate_labels=row["candidate_labels"], **options)
        case "document-question-answering" | "visual-question-answering":
            return pipeline(image=row["image"], question=row["question"], **options)
        case "table-question-answering":
            return pipeline(table=row["table"], query=row["question"], **options)
        case "image-text-to-text" | "image-to-text" | "any-to-any" if "text_input" in row:
            return _multimodal(pipeline, row, options)
        case "decision":
            return pipeline(_decision(row["text_input"]), **options)
    values = [row[name] for name in ("text_input", "image", "audio", "video") if name in row]
    return pipeline(values[0] if len(values) == 1 else values, **options)


def _multimodal(pipeline: Any, row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a multimodal pipeline, with a chat of one message if the checkpoint has a chat template."""
    media = [name for name in ("image", "audio") if name in row]
    if getattr(pipeline.processor, "chat_template", None):
        content = [{"type": name, name: row[name]} for name in media]
        message = {"role": "user", "content": [*content, {"type": "text", "text": row["text_input"]}]}
        return pipeline(text=[message], **{"return_full_text": False, **options})
    named = {"images" if name == "image" else name: row[name] for name in media}
    return pipeline(text=row["text_input"], **named, **options)


def _decision(text: str) -> dict[str, Any]:
    try:
        request = json.loads(text)
    except ValueError as error:
        raise invalid(f"input 'text_input' must be a JSON object with 'state' and 'questions': {error}") from None
    if not isinstance(request, dict) or "assets" in request:
        raise invalid("input 'text_input' must be a JSON object with 'state' and 'questions', without 'assets'")
    return request


_TEXT: Final = TensorSpec("text_input", "BYTES", (1,))
_IMAGE: Final = TensorSpec("image", "BYTES", (1,))
_LABELS: Final = TensorSpec("candidate_labels", "BYTES", (-1,))
_QUESTION: Final = TensorSpec("question", "BYTES", (1,))
_ANY_TEXT: Final = TensorSpec("text_input", "BYTES", (1,), optional=True)
_ANY_IMAGE: Final = TensorSpec("image", "BYTES", (1,), optional=True)

#: Inputs by task. Other tasks take text, or the inputs of a pipeline that the checkpoint declares.
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
#: Inputs of a pipeline that a checkpoint declares, by its ``type``.
_BY_TYPE: Final[Mapping[str, tuple[TensorSpec, ...]]] = {
    "text": (_TEXT,),
    "image": (_IMAGE,),
    "audio": SOUND_INPUTS,
    "multimodal": (_ANY_TEXT, _ANY_IMAGE, *SOUND_INPUTS),
}
OPTIONS: Final = TensorSpec("options", "BYTES", (1,), optional=True)

#: Tasks that read or write audio in every request.
_SOUND: Final = frozenset({"audio-classification", "zero-shot-audio-classification", "text-to-audio", "text-to-speech"})

#: Modules in the folder of the pipelines that are not pipelines.
_NO_TASKS: Final = frozenset({"__init__", "audio_utils", "base", "pt_utils"})


def inputs_of(task: str, config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task, ``options`` last; ``config`` is config.json, which may declare a pipeline."""
    own = own_pipeline(task, config)
    if task in _INPUTS or own is None:
        return (*_INPUTS.get(task, (_TEXT,)), OPTIONS)
    return (*_BY_TYPE.get(str(own[1].get("type")), (_TEXT,)), OPTIONS)


def check_task(task: str, config: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG unless transformers or the checkpoint has a pipeline for the task.

    Looks at the names of transformers' files, because importing it takes seconds. If transformers is not installed,
    every task passes.
    """
    module_spec = importlib.util.find_spec("transformers")
    folders = module_spec.submodule_search_locations if module_spec is not None else None
    files = {path.stem for folder in folders or () for path in Path(folder, "pipelines").glob("*.py")}
    if files and task.replace("-", "_") not in files and own_pipeline(task, config) is None:
        known = sorted(name.replace("_", "-") for name in files - _NO_TASKS)
        raise invalid(f"task '{task}' is not known; the tasks of transformers' pipelines are: {', '.join(known)}")


def require_libraries(task: str, inputs: Sequence[TensorSpec]) -> None:
    """Raise UNSUPPORTED unless the libraries for the required ``inputs`` are installed.

    transformers itself would report a missing library only at the first request.
    """
    if any(spec.name == "image" and not spec.optional for spec in inputs):
        media.require_images(task)
    if task in _SOUND:
        media.require_sound(task)
    if any(spec.name == "table" for spec in inputs):
        extras.require(f"task '{task}'", "pandas")


def own_pipeline(task: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and declaration of the checkpoint's own pipeline for ``task``, or None."""
    for name, declared in (config.get("custom_pipelines") or {}).items():
        if name.lower().replace("_", "-") == task.lower().replace("_", "-"):
            return name, declared
    return None


EXAMPLE_TEXT: Final = "Where is the nearest library?"


class PreparedRows(PreparedRequest):
    """The decoded rows of a request, and the pipeline's call arguments for each row."""

    __slots__ = ("arguments", "values")

    def __init__(self, request: Request, values: list[dict[str, Any]], arguments: list[dict[str, Any]]) -> None:
        super().__init__(request, 1, len(values))
        self.values = values
        self.arguments = arguments


class PipelineTask(Task):
    """Inputs by task: ``text_input``, ``image``, ``audio`` or ``samples`` …, and ``options`` STRING [1].

    ``options`` is a JSON object with arguments of the pipeline's call and of ``generate``. Output ``text_output``
    STRING [1] is the pipeline's result (see :func:`text_of`).
    """

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        inputs = self.describe(checkpoint).inputs
        self._names = frozenset(spec.name for spec in inputs)
        require_libraries(checkpoint.task, inputs)
        self._seconds, self._pixels = media.max_seconds(checkpoint.options), media.max_pixels(checkpoint.options)
        self._labels = max_labels(checkpoint.options)
        own = own_pipeline(checkpoint.task, checkpoint.config)
        self._task = own[0] if own is not None else checkpoint.task
        self._pipeline = load_pipeline(self._task, checkpoint, device_of(open_engine))
        extractor = getattr(self._pipeline, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", None) or 16_000)
        self._shortest = media.shortest(self._pipeline.model.config)
        self._needs_sound = self._task in ("audio-classification", "zero-shot-audio-classification")
        self._thread = local()
        require_pipeline_tensors(self._pipeline, checkpoint, lambda: self._call(self._example(), {}))

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        check_task(checkpoint.task, checkpoint.config)
        return TaskDescription(
            inputs_of(checkpoint.task, checkpoint.config),
            (TensorSpec("text_output", "BYTES", (1,)),),
            max_batch_size=16,
        )

    def prepare(self, request: Request) -> PreparedRows:
        """Decode the rows. Raises INVALID_ARG for inputs that cannot be read and for unknown arguments."""
        values: list[dict[str, Any]] = [{} for _ in range(request.rows)]
        for name in ("text_input", "question"):
            if name in self._names and request.has(name):
                _spread(values, name, request.texts(name))
        if "candidate_labels" in self._names:
            labels = request.texts("candidate_labels")
            if not labels or len(labels) % len(values):
                raise invalid("input 'candidate_labels' needs at least one label")
            check_labels(len(labels) // len(values), self._labels)
            _spread(values, "candidate_labels", labels, always_lists=True)
        if "table" in self._names:
            _spread(values, "table", [_table(text, row) for row, text in enumerate(request.texts("table"))])
        if "image" in self._names and request.has("image"):
            files = request.files("image")
            per_row = max(1, len(files) // max(1, len(values)))
            _spread(values, "image", media.images(files, pixels=self._pixels, per_row=per_row))
        if "audio" in self._names:
            count = request.has("audio") + request.has("samples")
            if count > 1:
                raise invalid("a request may have only one of the inputs 'audio' and 'samples'")
            if self._needs_sound and not count:
                raise invalid("a request needs one of the inputs 'audio' and 'samples'")
            sounds = media.sounds_of(request, self._rate, seconds=self._seconds, min_samples=self._shortest)
            if sounds:
                _spread(values, "audio", sounds)
        if "video" in self._names:
            files = request.files("video")
            _spread(values, "video", [media.file_bytes(data, "video", row) for row, data in enumerate(files)])
        if not values or any(not row for row in values):
            raise invalid(f"the request has none of the inputs {', '.join(sorted(self._names - {'options'}))}")
        texts = request.texts("options") if request.has("options") else [""] * len(values)
        return PreparedRows(
            request, values, [arguments(self._pipeline, self._task, text, row) for row, text in enumerate(texts)]
        )

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        return [self._run_request(prepared, work) for prepared in batch if isinstance(prepared, PreparedRows)]

    def _run_request(self, prepared: PreparedRows, work: ExecutionWork) -> Result | ConchError:
        texts = []
        for row, options in zip(prepared.values, prepared.arguments, strict=True):
            if prepared.request.cancelled:
                return cancelled("the request was cancelled")
            before = monotonic_ns()
            try:
                output = self._call(row, options)
            except ConchError as error:
                return error
            except ImportError as error:
                return extras.lacks_library(f"task '{self._task}'", error)
            except Exception as error:
                # Pipelines validate little, so unsuitable arguments fail with any type of error.
                return library_failure(f"task '{self._task}'", error, of_request=bool(options))
            texts.append(text_of(output))
            work.add(1, 1, 1)
            work.engine_ns += monotonic_ns() - before
        return Result({"text_output": Strings((len(texts), 1), texts)})

    def _call(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        pipeline = self._of_thread()
        if "video" not in row:
            return call(pipeline, self._task, row, options)
        # Pipelines decode videos only from files.
        with TemporaryFolder() as folder:
            path = folder / "video"
            path.write_bytes(row["video"])
            return call(pipeline, self._task, {**row, "video": str(path)}, options)

    def _example(self) -> dict[str, Any]:
        """Return an example row with the inputs of the task."""
        text = '{"state": "it is open", "questions": ["Is it open?"]}' if self._task == "decision" else EXAMPLE_TEXT
        examples: dict[str, Callable[[], Any]] = {
            "text_input": lambda: text,
            "question": lambda: EXAMPLE_TEXT,
            "candidate_labels": lambda: ["travel", "cooking"],
            "table": lambda: {"place": ["library", "station"], "open": ["1", "2"]},
            "image": media.example_image,
            "audio": lambda: media.example_sound(self._rate, self._shortest),
        }
        row = {name: make() for name, make in examples.items() if name in self._names}
        if self._task == "keypoint-matching":
            row["image"] = [row["image"], row["image"].rotate(90)]
        return row

    def _of_thread(self) -> Any:
        """Return the calling thread's copy of the pipeline.

        Copies share the weights; each has its own tokenizer, because tokenizers keep state.
        """
        if not hasattr(self._thread, "pipeline"):
            from torch.nn import Module

            # A pipeline may have networks other than its model, such as a vocoder.
            networks: dict[int, Any] = {
                id(part): part for part in vars(self._pipeline).values() if isinstance(part, Module)
            }
            self._thread.pipeline = copy.deepcopy(self._pipeline, networks)
        return self._thread.pipeline


def _spread(values: list[dict[str, Any]], name: str, elements: Sequence[Any], *, always_lists: bool = False) -> None:
    """Distribute the elements of a tensor over the rows; a row with several elements gets a list."""
    share = len(elements) // len(values)
    for row, value in enumerate(values):
        part = list(elements[row * share : (row + 1) * share])
        value[name] = part if always_lists or share != 1 else part[0]


def _table(text: str, row: int) -> Any:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise invalid(f"input 'table' in row {row} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise invalid(f"input 'table' in row {row} must be a JSON object of columns")
    return table
