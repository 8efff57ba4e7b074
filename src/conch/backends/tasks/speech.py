"""Automatic speech recognition: Whisper, CTC models and whatever else transformers' own pipeline loads.

Sound is decoded, resampled and made features as it arrives; the pipeline's three steps (``preprocess``,
``forward``, ``postprocess``) are called one by one, so that parts of several requests run as one batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from time import monotonic_ns
from typing import Any, Final

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.tasks import media
from conch.backends.tasks.base import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.decoding import generation_arguments, generation_inputs, stop_when_cancelled
from conch.backends.tasks.loading import device_of, load_pipeline, require_pipeline_tensors
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, invalid, one_line
from conch.inference import TensorSpec

#: Seconds of a chunk where the model itself knows no windows; a sixth overlaps on each side.
CHUNK_SECONDS: Final = 30
#: Seconds: what ``chunk_length_s`` may be at least; some networks cannot make one frame of what is shorter.
SHORT: Final = 0.1
#: Chunks in one run.
BATCH_CHUNKS: Final = 16

#: What ``return_timestamps`` may be, by the pipeline's kind of model, and what it is called there.
_TIMESTAMPS: Final[Mapping[str, Mapping[str, bool | str]]] = {
    "seq2seq_whisper": {"none": False, "segment": True, "word": "word"},
    "ctc": {"none": False, "word": "word", "char": "char"},
    "ctc_with_lm": {"none": False, "word": "word"},
    "tdt": {"none": False, "word": "word", "char": "char"},
    "seq2seq": {"none": False},
}
_GENERATION: Final = ("max_new_tokens", "num_beams", "do_sample", "temperature")

#: The same for all checkpoints.
DESCRIPTION: Final = TaskDescription(
    (
        *media.SOUND_INPUTS,
        TensorSpec("return_timestamps", "BYTES", (1,), optional=True),
        TensorSpec("language", "BYTES", (1,), optional=True),
        TensorSpec("task", "BYTES", (1,), optional=True),
        *generation_inputs(*_GENERATION),
    ),
    (TensorSpec("text_output", "BYTES", (1,)), TensorSpec("chunks", "BYTES", (1,))),
    max_batch_size=16,
)


@dataclass(slots=True)
class _Recording:
    """One row of a request: the chunks that the model is given, and its answers so far."""

    request: Request
    seconds: float
    timestamps: bool | str
    generation: dict[str, Any]
    chunks: list[dict[str, Any]]
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: ConchError | None = None


class PreparedSpeech(PreparedRequest):
    """The recordings of a request; the length is in frames of features, or samples for a model that takes them."""

    __slots__ = ("recordings",)

    def __init__(self, request: Request, recordings: list[_Recording]) -> None:
        chunks = [chunk for recording in recordings for chunk in recording.chunks]
        super().__init__(request, max(_frames(chunk) for chunk in chunks), len(chunks))
        self.recordings = recordings


class SpeechRecognition(Task):
    """Input ``audio`` STRING [1] (a WAV, FLAC or OGG file) or ``samples`` FP32 [-1] (mono, between -1 and 1).

    ``samples`` are at ``sampling_rate`` Hz (INT32 [1]), 16000 without it.  Outputs ``text_output`` STRING [1] and
    ``chunks`` STRING [1]: JSON ``[{"text", "start", "end"}]`` in seconds, empty unless ``return_timestamps`` asks for
    ``segment``, ``word`` or ``char``, as far as the model can.  ``language`` and ``task`` (``transcribe``,
    ``translate``) are for Whisper of several languages.

    What is longer than a window of Whisper is transcribed window by window, each beginning where the last segment
    ended; other models get chunks that overlap.  The parameter ``chunk_length_s`` asks for such chunks with Whisper
    too (faster on a GPU, less exact at the seams) or for others than 30 seconds; ``max_audio_seconds`` limits the
    length.
    """

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        media.max_seconds(options)
        chunk = options.number("chunk_length_s")
        if chunk and chunk < SHORT:
            raise invalid(f"parameter 'chunk_length_s' is {chunk:g}; it must be 0 (no chunks) or {SHORT} at least")
        return DESCRIPTION

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        self.describe(checkpoint, options)
        media.require_sound(checkpoint.task)
        self._pipeline: Any = load_pipeline("automatic-speech-recognition", checkpoint, options, device_of(open_engine))
        self._kind: str = self._pipeline.type
        self._rate = int(self._pipeline.feature_extractor.sampling_rate)
        self._window = int(getattr(self._pipeline.feature_extractor, "n_samples", 0))
        self._seconds = media.max_seconds(options)
        self._shortest = media.shortest(self._pipeline.model.config)
        own_windows = self._kind in ("seq2seq_whisper", "tdt")
        self._chunk = options.number("chunk_length_s", 0 if own_windows else CHUNK_SECONDS)
        self._lock = Lock()
        self._word_pipeline: Any = None
        sound = media.example_sound(self._rate, self._shortest)
        require_pipeline_tensors(self._pipeline, checkpoint, lambda: self._pipeline(_raw(sound, self._rate)))

    def prepare(self, request: Request) -> PreparedSpeech:
        """Decode and make features.  Raises INVALID_ARG for sound that cannot be read and options that do not fit."""
        timestamps, generation = self._timestamps(request), self._generation(request)
        if request.has("audio") == request.has("samples"):
            raise invalid("a request needs exactly one of the inputs 'audio' and 'samples'")
        sounds = media.sounds_of(request, self._rate, seconds=self._seconds, least=self._shortest)
        if not sounds:
            raise invalid("the request has no rows")
        recordings = [self._recording(request, samples, timestamps, generation) for samples in sounds]
        return PreparedSpeech(request, recordings)

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        groups: dict[str, list[tuple[_Recording, int]]] = {}
        for prepared in batch:
            assert isinstance(prepared, PreparedSpeech)
            for recording in prepared.recordings:
                for place in range(len(recording.chunks)):
                    groups.setdefault(self._group(recording, place), []).append((recording, place))
        for group in groups.values():
            for start in range(0, len(group), BATCH_CHUNKS):
                self._run(group[start : start + BATCH_CHUNKS], work)
        return [self._result(prepared) for prepared in batch]

    def _recording(
        self, request: Request, samples: media.Samples, timestamps: bool | str, generation: dict[str, Any]
    ) -> _Recording:
        chunked = {"chunk_length_s": self._chunk} if self._chunk else {}
        try:
            chunks = list(self._pipeline.preprocess(_raw(samples, self._rate), **chunked))
        except ValueError as error:
            raise invalid(f"sound of {len(samples)} samples does not suit the model: {one_line(error)}") from error
        recording = _Recording(request, len(samples) / self._rate, timestamps, generation, chunks)
        if self._windows(recording):
            # Whisper finds the beginning of the next window by its timestamps.
            recording.timestamps = timestamps or True
        return recording

    def _windows(self, recording: _Recording) -> bool:
        """Whether Whisper goes through the recording window by window, which only one does at a time."""
        return 0 < self._window < recording.seconds * self._rate and not self._chunk

    def _timestamps(self, request: Request) -> bool | str:
        kind = request.option("return_timestamps", "none")
        known = _TIMESTAMPS.get(self._kind, {"none": False})
        if kind not in known:
            raise invalid(f"input 'return_timestamps' is '{kind}'; this model can give: {', '.join(known)}")
        return known[kind]

    def _generation(self, request: Request) -> dict[str, Any]:
        names = [name for name in ("language", "task", *_GENERATION) if request.has(name)]
        if names and self._kind not in ("seq2seq_whisper", "seq2seq"):
            raise invalid(f"input '{names[0]}' is not for this model: it reads sound off, frame by frame")
        generation = generation_arguments(request, _GENERATION)
        for name in ("language", "task"):
            value = request.option(name)
            if not value:
                continue
            if self._kind != "seq2seq_whisper" or not getattr(
                self._pipeline.model.generation_config, "is_multilingual", False
            ):
                raise invalid(f"input '{name}' is '{value}', but this model has no choice of languages")
            generation[name] = value
        if generation.get("task", "transcribe") not in ("transcribe", "translate"):
            raise invalid(f"input 'task' is '{generation['task']}'; it must be transcribe or translate")
        return generation

    def _group(self, recording: _Recording, place: int) -> str:
        """A key that chunks share that may run together: those of equal shapes and parameters, so none is padded."""
        chunk = recording.chunks[place]
        shapes = [(name, tuple(value.shape)) for name, value in sorted(chunk.items()) if hasattr(value, "shape")]
        key = f"{shapes} {'stride' in chunk} {recording.timestamps} {sorted(recording.generation.items())}"
        alone = recording.timestamps == "word" and self._kind == "seq2seq_whisper"
        return f"{key} {id(recording)} {place}" if alone or self._windows(recording) else key

    def _run(self, group: list[tuple[_Recording, int]], work: ExecutionWork) -> None:
        first = group[0][0]
        parameters: dict[str, Any] = {}
        if self._kind in ("seq2seq_whisper", "seq2seq"):
            parameters = dict(first.generation)
            if first.timestamps:
                parameters["return_timestamps"] = first.timestamps
            parameters["stopping_criteria"] = stop_when_cancelled([recording.request for recording, _ in group])
        chunks = [recording.chunks[place] for recording, place in group]
        before = monotonic_ns()
        try:
            answers = _separated(
                self._pipeline_for(first.timestamps).forward(_joined(chunks), **parameters), len(chunks)
            )
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            failed = library_failure("recognition", error, of_request=first.seconds < SHORT)
            for recording, _ in group:
                recording.error = failed
            return
        frames = sum(_frames(chunk) for chunk in chunks)
        work.add(frames, frames, len(chunks))
        work.engine_ns += monotonic_ns() - before
        for (recording, place), answer in zip(group, answers, strict=True):
            recording.answers[place] = answer

    def _pipeline_for(self, timestamps: bool | str) -> Any:
        """The pipeline; for word timestamps of Whisper, another one over the same weights with its own configuration.

        transformers tells words by the attention, and switches the model to an implementation that returns it, which
        would change what other threads are computing at that moment.
        """
        if timestamps != "word" or self._kind != "seq2seq_whisper":
            return self._pipeline
        with self._lock:
            if self._word_pipeline is None:
                model = self._pipeline.model
                shared: dict[int, Any] = {id(one): one for one in chain(model.parameters(), model.buffers())}
                self._word_pipeline = copy.copy(self._pipeline)
                self._word_pipeline.model = copy.deepcopy(model, shared)
                self._word_pipeline.model.set_attn_implementation("eager")
            return self._word_pipeline

    def _result(self, prepared: PreparedRequest) -> Result | ConchError:
        assert isinstance(prepared, PreparedSpeech)
        texts, chunks = [], []
        for recording in prepared.recordings:
            if recording.error is not None:
                return recording.error
            answers = [recording.answers[place] for place in range(len(recording.chunks))]
            given = self._pipeline.postprocess(answers, return_timestamps=recording.timestamps)
            texts.append(given["text"])
            wants_chunks = prepared.request.option("return_timestamps", "none") != "none"
            pieces = given.get("chunks", []) if wants_chunks else []
            chunks.append(json.dumps([_chunk(piece, recording.seconds) for piece in pieces], ensure_ascii=False))
        shape = (len(texts), 1)
        return Result({"text_output": Strings(shape, texts), "chunks": Strings(shape, chunks)})


def _raw(samples: media.Samples, rate: int) -> dict[str, Any]:
    """Sound as the pipeline takes it, which changes what it is given."""
    return {"raw": samples, "sampling_rate": rate}


def _chunk(piece: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A piece of text with its time in seconds; one cut off by an end of the recording begins or ends there."""
    start, end = piece["timestamp"]
    return {
        "text": piece["text"],
        "start": round(float(start or 0.0), 3),
        "end": round(float(seconds if end is None else end), 3),
    }


def _frames(chunk: Mapping[str, Any]) -> int:
    """Roughly how many positions the encoder has for a chunk: half its features, or a 320th of its samples."""
    shapes = [tuple(map(int, value.shape)) for value in chunk.values() if getattr(value, "ndim", 0) >= 2]
    return max(max(1, shape[-1] // (2 if len(shape) > 2 else 320)) for shape in shapes)


def _joined(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chunks of equal shapes as one: tensors along the batch dimension, anything else as a list."""
    import torch

    if len(chunks) == 1:
        return dict(chunks[0])
    return {
        name: torch.cat([chunk[name] for chunk in chunks])
        if isinstance(value, torch.Tensor)
        else [chunk[name] for chunk in chunks]
        for name, value in chunks[0].items()
    }


def _separated(answers: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The inverse of ``_joined``, for what the model answered."""
    if count == 1:
        return [dict(answers)]
    return [
        {name: value[place : place + 1] if hasattr(value, "shape") else value[place] for name, value in answers.items()}
        for place in range(count)
    ]
