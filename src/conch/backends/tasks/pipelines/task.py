"""Every task of ``transformers.pipeline`` that has no module of its own: what transformers loads, conch serves.

Rows are decoded as they arrive and given to the pipeline one by one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from threading import local
from time import monotonic_ns
from typing import Any, Final

from conch import extras
from conch.backends.native.arrays import Request, Result, Strings
from conch.backends.tasks import media
from conch.backends.tasks.base import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.hypotheses import check_labels, max_labels
from conch.backends.tasks.loading import device_of, load_pipeline, require_pipeline_tensors
from conch.backends.tasks.pipelines.answers import text_of
from conch.backends.tasks.pipelines.calls import arguments, call
from conch.backends.tasks.pipelines.inputs import check_task, inputs_of, own_pipeline, require_libraries
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, cancelled, invalid
from conch.inference import TensorSpec
from conch.temporary import TemporaryFolder

EXAMPLE_TEXT: Final = "Where is the nearest library?"


class PreparedRows(PreparedRequest):
    """The rows of a request as a pipeline takes them, and the call arguments of each row."""

    __slots__ = ("arguments", "values")

    def __init__(self, request: Request, values: list[dict[str, Any]], arguments: list[dict[str, Any]]) -> None:
        super().__init__(request, 1, len(values))
        self.values = values
        self.arguments = arguments


class PipelineTask(Task):
    """Inputs by task: ``text_input``, ``image``, ``audio`` or ``samples`` …, and ``options`` STRING [1].

    ``options`` is a JSON object with arguments of the pipeline's call and of ``generate``.  Output ``text_output``
    STRING [1]: the pipeline's answer (see :func:`text_of`).
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        inputs = self.describe(checkpoint, options).inputs
        self._names = frozenset(spec.name for spec in inputs)
        require_libraries(checkpoint.task, inputs)
        self._seconds, self._pixels = media.max_seconds(options), media.max_pixels(options)
        self._labels = max_labels(options)
        own = own_pipeline(checkpoint.task, checkpoint.config)
        self._task = own[0] if own is not None else checkpoint.task
        self._pipeline = load_pipeline(self._task, checkpoint, options, device_of(open_engine))
        extractor = getattr(self._pipeline, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", None) or 16_000)
        self._shortest = media.shortest(self._pipeline.model.config)
        self._needs_sound = self._task in ("audio-classification", "zero-shot-audio-classification")
        self._thread = local()
        require_pipeline_tensors(self._pipeline, checkpoint, lambda: self._call(self._example(), {}))

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        check_task(checkpoint.task, checkpoint.config)
        return TaskDescription(
            inputs_of(checkpoint.task, checkpoint.config),
            (TensorSpec("text_output", "BYTES", (1,)),),
            max_batch_size=16,
        )

    def prepare(self, request: Request) -> PreparedRows:
        """Decode the rows.  Raises INVALID_ARG for what cannot be read and for arguments that do not exist."""
        values: list[dict[str, Any]] = [{} for _ in range(request.rows)]
        for name in ("text_input", "question"):
            if name in self._names and request.has(name):
                _spread(values, name, request.texts(name))
        if "candidate_labels" in self._names:
            labels = request.texts("candidate_labels")
            if not labels or len(labels) % len(values):
                raise invalid("input 'candidate_labels' needs one label at least")
            check_labels(len(labels) // len(values), self._labels)
            _spread(values, "candidate_labels", labels, always_lists=True)
        if "table" in self._names:
            _spread(values, "table", [_table(text, row) for row, text in enumerate(request.texts("table"))])
        if "image" in self._names and request.has("image"):
            files = request.files("image")
            per_row = max(1, len(files) // max(1, len(values)))
            _spread(values, "image", media.images(files, pixels=self._pixels, per_row=per_row))
        if "audio" in self._names:
            given = request.has("audio") + request.has("samples")
            if given > 1:
                raise invalid("a request has at most one of the inputs 'audio' and 'samples'")
            if self._needs_sound and not given:
                raise invalid("a request needs one of the inputs 'audio' and 'samples'")
            sounds = media.sounds_of(request, self._rate, seconds=self._seconds, least=self._shortest)
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
        return [self._answer(prepared, work) for prepared in batch if isinstance(prepared, PreparedRows)]

    def _answer(self, prepared: PreparedRows, work: ExecutionWork) -> Result | ConchError:
        texts = []
        for row, given in zip(prepared.values, prepared.arguments, strict=True):
            if prepared.request.cancelled:
                return cancelled("the request was cancelled")
            before = monotonic_ns()
            try:
                answer = self._call(row, given)
            except ConchError as error:
                return error
            except ImportError as error:
                return extras.lacks_library(f"task '{self._task}'", error)
            except Exception as error:
                # Pipelines check little beforehand: what does not suit them fails wherever it is used.
                return library_failure(f"task '{self._task}'", error, of_request=bool(given))
            texts.append(text_of(answer))
            work.add(1, 1, 1)
            work.engine_ns += monotonic_ns() - before
        return Result({"text_output": Strings((len(texts), 1), texts)})

    def _call(self, row: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        pipeline = self._of_thread()
        if "video" not in row:
            return call(pipeline, self._task, row, given)
        # Videos are decoded from files only.
        with TemporaryFolder() as folder:
            path = folder / "video"
            path.write_bytes(row["video"])
            return call(pipeline, self._task, {**row, "video": str(path)}, given)

    def _example(self) -> dict[str, Any]:
        """A row with whatever the task takes."""
        text = '{"state": "it is open", "questions": ["Is it open?"]}' if self._task == "decision" else EXAMPLE_TEXT
        made: dict[str, Callable[[], Any]] = {
            "text_input": lambda: text,
            "question": lambda: EXAMPLE_TEXT,
            "candidate_labels": lambda: ["travel", "cooking"],
            "table": lambda: {"place": ["library", "station"], "open": ["1", "2"]},
            "image": media.example_image,
            "audio": lambda: media.example_sound(self._rate, self._shortest),
        }
        row = {name: make() for name, make in made.items() if name in self._names}
        if self._task == "keypoint-matching":
            row["image"] = [row["image"], row["image"].rotate(90)]
        return row

    def _of_thread(self) -> Any:
        """The pipeline of the calling thread: over the same weights, with tokenizers of its own, which keep state."""
        if not hasattr(self._thread, "pipeline"):
            from torch.nn import Module

            # A pipeline may have other networks beside its model: a vocoder.
            networks: dict[int, Any] = {
                id(part): part for part in vars(self._pipeline).values() if isinstance(part, Module)
            }
            self._thread.pipeline = copy.deepcopy(self._pipeline, networks)
        return self._thread.pipeline


def _spread(values: list[dict[str, Any]], name: str, elements: Sequence[Any], *, always_lists: bool = False) -> None:
    """Give each row its share of the elements of a tensor, a list of them where there are several."""
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
