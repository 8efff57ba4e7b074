"""Every task of ``transformers.pipeline`` that has no module of its own: what transformers loads, conch serves.

Rows are decoded as they arrive and given to the pipeline one by one.
"""

from __future__ import annotations

import copy
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import local
from typing import Any

import numpy as np

from conch.backends.native.arrays import Request, Result, Strings
from conch.backends.tasks import media
from conch.backends.tasks.base import ExecutionWork, Prepared, Task
from conch.backends.tasks.loading import device_of, load_pipeline
from conch.backends.tasks.pipelines import arguments, call, check_task, inputs_of, own_pipeline
from conch.backends.tasks.table import OpenEngine, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, cancelled, internal, invalid, one_line, unsupported
from conch.inference import TensorSpec

#: What a pipeline's answer is when it is text and nothing else.
_TEXTS = ("generated_text", "answer", "text", "summary_text", "translation_text")


class PreparedRows(Prepared):
    """Each row as a pipeline takes it, and the call arguments of each."""

    __slots__ = ("arguments", "values")

    def __init__(self, request: Request, values: list[dict[str, Any]], arguments: list[dict[str, Any]]) -> None:
        super().__init__(request, 1, len(values))
        self.values = values
        self.arguments = arguments


class Generic(Task):
    """Inputs by task: ``text_input``, ``image``, ``audio`` or ``samples`` …, and ``options`` STRING [1].

    ``options`` is a JSON object with arguments of the pipeline's call and of ``generate``.  Output ``text_output``
    STRING [1]: the text where the pipeline answers one text, else its answer as JSON, in which an image is the base64
    of a PNG file, sound beside a ``sampling_rate`` that of a WAV file, and any other array a list.
    """

    max_batch_size = 16

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        signature = self.describe(checkpoint, options)
        self.inputs, self.outputs = signature.inputs, signature.outputs
        self._names = frozenset(spec.name for spec in self.inputs)
        self._seconds, self._pixels = media.max_seconds(options), media.max_pixels(options)
        own = own_pipeline(checkpoint.task, checkpoint.config)
        self._task = own[0] if own is not None else checkpoint.task
        self._pipeline = load_pipeline(self._task, checkpoint, options, device_of(open_engine))
        extractor = getattr(self._pipeline, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", None) or 16_000)
        self._shortest = media.shortest(self._pipeline.model.config)
        self._thread = local()

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        check_task(checkpoint.task, checkpoint.config)
        return TaskDescription(
            inputs_of(checkpoint.task, checkpoint.config),
            (TensorSpec("text_output", "BYTES", (1,)),),
            cls.max_batch_size,
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
            _spread(values, "candidate_labels", labels, always_lists=True)
        if "table" in self._names:
            _spread(values, "table", [_table(text, row) for row, text in enumerate(request.texts("table"))])
        if "image" in self._names and request.has("image"):
            files = request.files("image")
            per_row = max(1, len(files) // max(1, len(values)))
            images = [media.image(data, pixels=self._pixels, row=n // per_row) for n, data in enumerate(files)]
            _spread(values, "image", images)
        if "audio" in self._names:
            self._sounds(request, values)
        if "video" in self._names:
            files = request.files("video")
            _spread(values, "video", [media.file_bytes(data, "video", row) for row, data in enumerate(files)])
        if not values or any(not row for row in values):
            raise invalid(f"the request has none of the inputs {', '.join(sorted(self._names - {'options'}))}")
        texts = request.texts("options") if request.has("options") else [""] * len(values)
        return PreparedRows(
            request, values, [arguments(self._pipeline, self._task, text, row) for row, text in enumerate(texts)]
        )

    def execute(self, batch: Sequence[Prepared], usage: ExecutionWork) -> list[Result | ConchError]:
        return [self._answer(prepared, usage) for prepared in batch if isinstance(prepared, PreparedRows)]

    def _answer(self, prepared: PreparedRows, usage: ExecutionWork) -> Result | ConchError:
        texts = []
        for row, given in zip(prepared.values, prepared.arguments, strict=True):
            if prepared.request.cancelled:
                return cancelled("the request was cancelled")
            try:
                answer = self._call(row, given)
            except ConchError as error:
                return error
            except ImportError as error:
                return unsupported(f"task '{self._task}' needs a library: {one_line(error)}")
            except Exception as error:
                # Pipelines check little beforehand: what does not suit them fails wherever it is used.
                kind = invalid if given or isinstance(error, ValueError) else internal
                return kind(f"task '{self._task}' failed: {one_line(error)}")
            texts.append(_text(answer))
            usage.add(1, 1, 1)
        return Result({"text_output": Strings((len(texts), 1), texts)})

    def _call(self, row: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        pipeline = self._of_thread()
        if "video" not in row:
            return call(pipeline, self._task, row, given)
        # Videos are decoded from files only.
        with TemporaryDirectory(prefix="conch-") as folder:
            path = Path(folder, "video")
            path.write_bytes(row["video"])
            return call(pipeline, self._task, {**row, "video": str(path)}, given)

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

    def _sounds(self, request: Request, values: list[dict[str, Any]]) -> None:
        if request.has("audio") and request.has("samples"):
            raise invalid("a request has at most one of the inputs 'audio' and 'samples'")
        sounds: list[media.Samples] = []
        if request.has("audio"):
            sounds = [
                media.audio(data, self._rate, seconds=self._seconds, row=row)
                for row, data in enumerate(request.files("audio"))
            ]
        elif request.has("samples"):
            given = int(request.option("sampling_rate", 16_000))
            rows = request.array("samples").reshape(request.rows, -1)
            sounds = [
                media.samples(one, given, self._rate, seconds=self._seconds, row=row) for row, one in enumerate(rows)
            ]
        elif self._task in ("audio-classification", "zero-shot-audio-classification"):
            raise invalid("a request needs one of the inputs 'audio' and 'samples'")
        for row, one in enumerate(sounds):
            media.check_length(one, self._shortest, self._rate, "audio" if request.has("audio") else "samples", row)
        if sounds:
            _spread(values, "audio", sounds)


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


def _text(answer: Any) -> str:
    """What goes out for a pipeline's answer."""
    alone = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if isinstance(alone, str):
        return alone
    if isinstance(alone, Mapping):
        found = [alone[name] for name in _TEXTS if isinstance(alone.get(name), str)]
        if found:
            return str(found[0])
    return json.dumps(_plain(answer), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A pipeline's answer in the types that JSON has."""
    if isinstance(value, Mapping):
        if "sampling_rate" in value and isinstance(value.get("audio"), np.ndarray):
            rate = int(value["sampling_rate"])
            return {"audio": b64encode(media.wav(value["audio"], rate)).decode(), "sampling_rate": rate}
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "save") and hasattr(value, "convert"):
        return b64encode(media.png(value)).decode()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
