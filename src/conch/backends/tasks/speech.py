"""The task ``automatic-speech-recognition``: Whisper, CTC models and other models of transformers' pipeline.

Audio is decoded, resampled and converted to features as it arrives. The pipeline's three steps (``preprocess``,
``forward``, ``postprocess``) are called separately, so that chunks of several requests run as one batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from threading import Lock
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from conch.backends.base.arrays import Request, Result, Strings
from conch.backends.base.backend_base import versioned
from conch.backends.graphs.openvino import CompileSettings
from conch.backends.tasks import media
from conch.backends.tasks.engines import choose
from conch.backends.tasks.task import (
    ExecutionWork,
    OpenEngine,
    PreparedRequest,
    Task,
    TaskDescription,
    library_failure,
)
from conch.backends.tasks.transformers import (
    device_of,
    generation_arguments,
    generation_inputs,
    load_pipeline,
    require_pipeline_tensors,
    stop_when_cancelled,
)
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Variant
from conch.core.errors import ConchError, cancelled, invalid, one_line, unsupported
from conch.core.inference import TensorSpec
from conch.machine import extras
from conch.machine.facts import usable_cores

if TYPE_CHECKING:
    from conch.backends.tasks.windows import WindowFollower

#: Default chunk length (s) of models without their own windows; a sixth of it overlaps on each side.
CHUNK_SECONDS: Final = 30
#: Minimum of ``chunk_length_s`` (s); in some networks, a shorter chunk is less than a frame.
SHORT: Final = 0.1
#: The maximum number of chunks in one run.
BATCH_CHUNKS: Final = 16

#: Values of ``return_timestamps`` and the pipeline's names for them, by the pipeline's model type.
_TIMESTAMPS: Final[Mapping[str, Mapping[str, bool | str]]] = {
    "seq2seq_whisper": {"none": False, "segment": True, "word": "word"},
    "ctc": {"none": False, "word": "word", "char": "char"},
    "ctc_with_lm": {"none": False, "word": "word"},
    "tdt": {"none": False, "word": "word", "char": "char"},
    "seq2seq": {"none": False},
}
_GENERATION: Final = ("max_new_tokens", "num_beams", "do_sample", "temperature")

#: The tensors of all checkpoints.
DESCRIPTION: Final = TaskDescription(
    (
        *media.SOUND_INPUTS,
        TensorSpec("return_timestamps", "BYTES", (1,), optional=True),
        TensorSpec("language", "BYTES", (1,), optional=True),
        TensorSpec("task", "BYTES", (1,), optional=True),
        TensorSpec("prompt", "BYTES", (1,), optional=True),
        TensorSpec("return_language", "BOOL", (1,), optional=True),
        TensorSpec("return_scores", "BOOL", (1,), optional=True),
        *generation_inputs(*_GENERATION),
    ),
    (
        TensorSpec("text_output", "BYTES", (1,)),
        TensorSpec("chunks", "BYTES", (1,)),
        TensorSpec("duration", "FP32", (1,)),
        TensorSpec("language", "BYTES", (1,)),
    ),
    max_batch_size=16,
)


@dataclass(slots=True)
class _Recording:
    """One row of a request: its chunks, and the model's outputs for the completed chunks."""

    request: Request
    seconds: float
    timestamps: bool | str
    language: bool
    scores: bool
    generation: dict[str, Any]
    chunks: list[dict[str, Any]]
    outputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    follower: WindowFollower | None = None
    error: ConchError | None = None


class PreparedSpeech(PreparedRequest):
    """The recordings of a request. ``length`` is the approximate number of encoder frames of the longest chunk."""

    __slots__ = ("recordings",)

    def __init__(self, request: Request, recordings: list[_Recording]) -> None:
        chunks = [chunk for recording in recordings for chunk in recording.chunks]
        super().__init__(request, max(_frames(chunk) for chunk in chunks), len(chunks))
        self.recordings = recordings


class SpeechRecognition(Task):
    """Input ``audio`` STRING [1] (a file) or ``samples`` FP32 [-1] (mono, between -1 and 1).

    ``audio`` is in a format that :func:`conch.backends.tasks.media.audio` reads. ``samples`` are at ``sampling_rate``
    Hz (INT32 [1], default 16000). Outputs are ``text_output`` STRING [1], ``chunks`` STRING [1], JSON
    ``[{"text", "start", "end"}]`` in seconds, ``duration`` FP32 [1] in seconds and ``language`` STRING [1]. ``chunks``
    is empty unless ``return_timestamps`` is ``segment``, ``word`` or ``char``; the model determines which of them are
    available. ``language`` and ``task`` (``transcribe``, ``translate``) are for multilingual Whisper models, which also
    report the language (``english``) if ``return_language`` is set. ``prompt`` is text before the recording, for
    Whisper. With ``return_scores``, Whisper's segments also have the members of :class:`WindowScores`.

    A streaming client gets the text as it becomes final: after each of Whisper's windows, or each run of chunks.

    A converted Whisper runs on OpenVINO, with everything else as transformers has it (``whisper``).

    Whisper transcribes long recordings window by window; each window begins where the last segment ended. Other models
    read overlapping chunks. The parameter ``chunk_length_s`` sets the chunk length (default 30 seconds) and makes
    Whisper read chunks too, which is faster on a GPU but less exact at the chunk borders. ``max_audio_seconds`` limits
    the length of a recording.
    """

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        media.max_seconds(checkpoint.options)
        chunk = checkpoint.options.number("chunk_length_s")
        if chunk and chunk < SHORT:
            raise invalid(f"parameter 'chunk_length_s' is {chunk:g}; it must be 0 (no chunks) or at least {SHORT}")
        return DESCRIPTION

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        self.describe(checkpoint)
        media.require_sound(checkpoint.task)
        device, instances = device_of(open_engine), int(getattr(open_engine, "instances", 1))
        self._variant = served_variant(checkpoint, device)
        self._pipeline: Any = open_pipeline(checkpoint, self._variant, device, instances)
        self._kind: str = self._pipeline.type
        self._rate = int(self._pipeline.feature_extractor.sampling_rate)
        self._window = int(getattr(self._pipeline.feature_extractor, "n_samples", 0))
        self._seconds = media.max_seconds(checkpoint.options)
        self._shortest = media.shortest(self._pipeline.model.config)
        if self._kind == "seq2seq_whisper":
            from conch.backends.tasks import windows

            windows.watch(self._pipeline.model)
        own_windows = self._kind in ("seq2seq_whisper", "tdt")
        self._chunk = checkpoint.options.number("chunk_length_s", 0 if own_windows else CHUNK_SECONDS)
        self._lock = Lock()
        self._word_pipeline: Any = None
        if self._variant is None:  # an exported graph contains all of its weights
            sound = media.example_sound(self._rate, self._shortest)
            require_pipeline_tensors(self._pipeline, checkpoint, lambda: self._pipeline(_raw(sound, self._rate)))

    @property
    def runtime_facts(self) -> dict[str, str]:
        variant = self._variant
        if variant is None:
            return {}
        return {"engine": versioned(variant.engine), "precision": variant.precision, "variant": variant.name}

    def prepare(self, request: Request) -> PreparedSpeech:
        """Decode the audio and extract features.

        Raises INVALID_ARG for audio that cannot be read and for options that the model does not support.
        """
        timestamps, generation = self._timestamps(request), self._generation(request)
        if request.has("audio") == request.has("samples"):
            raise invalid("a request needs exactly one of the inputs 'audio' and 'samples'")
        sounds = media.sounds_of(request, self._rate, seconds=self._seconds, min_samples=self._shortest)
        if not sounds:
            raise invalid("the request has no rows")
        language = bool(request.option("return_language", False)) and self._multilingual
        scores = bool(request.option("return_scores", False)) and self._scores_segments and timestamps is True
        recordings = [self._recording(request, samples, timestamps, language, scores, generation) for samples in sounds]
        return PreparedSpeech(request, recordings)

    def execute(self, batch: Sequence[PreparedRequest], work: ExecutionWork) -> list[Result | ConchError]:
        groups: dict[str, list[tuple[_Recording, int]]] = {}
        for prepared in batch:
            assert isinstance(prepared, PreparedSpeech)
            for recording in prepared.recordings:
                for index in range(len(recording.chunks)):
                    groups.setdefault(self._group(recording, index), []).append((recording, index))
        for group in groups.values():
            for start in range(0, len(group), BATCH_CHUNKS):
                part = group[start : start + BATCH_CHUNKS]
                self._run([entry for entry in part if not entry[0].request.cancelled], work)
                self._preview(part)
        return [self._result(prepared) for prepared in batch]

    def _recording(
        self,
        request: Request,
        samples: media.Samples,
        timestamps: bool | str,
        language: bool,
        scores: bool,
        generation: dict[str, Any],
    ) -> _Recording:
        chunked = {"chunk_length_s": self._chunk} if self._chunk else {}
        try:
            chunks = list(self._pipeline.preprocess(_raw(samples, self._rate), **chunked))
        except ValueError as error:
            raise invalid(f"the model does not accept audio of {len(samples)} samples: {one_line(error)}") from error
        recording = _Recording(request, len(samples) / self._rate, timestamps, language, scores, generation, chunks)
        if self._windows(recording):
            # Timestamps determine where Whisper's next window begins.
            recording.timestamps = timestamps or True
        return recording

    def _windows(self, recording: _Recording) -> bool:
        """Whether Whisper transcribes the recording window by window; such a recording runs alone."""
        return 0 < self._window < recording.seconds * self._rate and not self._chunk

    def _timestamps(self, request: Request) -> bool | str:
        kind = request.option("return_timestamps", "none")
        known = _TIMESTAMPS.get(self._kind, {"none": False})
        if kind not in known:
            raise invalid(f"input 'return_timestamps' is '{kind}'; this model supports: {', '.join(known)}")
        return known[kind]

    @property
    def _multilingual(self) -> bool:
        """Whether the model has a choice of languages."""
        return self._kind == "seq2seq_whisper" and getattr(
            self._pipeline.model.generation_config, "is_multilingual", False
        )

    @property
    def _scores_segments(self) -> bool:
        """Whether the model is Whisper with its own windows."""
        return self._kind == "seq2seq_whisper" and not self._chunk

    def _generation(self, request: Request) -> dict[str, Any]:
        names = [name for name in ("language", "task", "prompt", *_GENERATION) if request.has(name)]
        if names and self._kind not in ("seq2seq_whisper", "seq2seq"):
            raise invalid(f"input '{names[0]}' is not supported by this model, which transcribes frame by frame")
        generation = generation_arguments(request, _GENERATION)
        for name in ("language", "task"):
            value = request.option(name)
            if not value:
                continue
            if not self._multilingual:
                raise invalid(f"input '{name}' is '{value}', but this model has no choice of languages")
            generation[name] = value
        if generation.get("task", "transcribe") not in ("transcribe", "translate"):
            raise invalid(f"input 'task' is '{generation['task']}'; it must be transcribe or translate")
        if prompt := request.option("prompt"):
            generation["prompt_ids"] = self._prompt_tokens(prompt)
        return generation

    def _prompt_tokens(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, without its beginning if it takes more than half of the model's positions."""
        if self._kind != "seq2seq_whisper":
            raise invalid("input 'prompt' is not supported by this model, which is not Whisper")
        try:
            first, *tokens = self._pipeline.tokenizer.get_prompt_ids(prompt).tolist()
        except ValueError as error:
            raise invalid(f"input 'prompt' cannot be used: {one_line(error)}") from None
        return (first, *tokens[1 - self._pipeline.model.config.max_target_positions // 2 :])

    def _group(self, recording: _Recording, index: int) -> str:
        """Return the batch key of a chunk: chunks of equal shapes and parameters share it and need no padding."""
        chunk = recording.chunks[index]
        shapes = [(name, tuple(value.shape)) for name, value in sorted(chunk.items()) if hasattr(value, "shape")]
        key = f"{shapes} {'stride' in chunk} {recording.timestamps} {sorted(recording.generation.items())}"
        # The pipeline returns only the language of the first recording of a batch; a follower follows one recording.
        alone = (recording.timestamps == "word" and self._kind == "seq2seq_whisper") or (
            recording.language or recording.scores
        )
        return f"{key} {id(recording)} {index}" if alone or self._windows(recording) else key

    def _run(self, group: list[tuple[_Recording, int]], work: ExecutionWork) -> None:
        if not group:
            return
        first = group[0][0]
        requests = [recording.request for recording, _ in group]
        parameters: dict[str, Any] = {}
        if self._kind in ("seq2seq_whisper", "seq2seq"):
            parameters = dict(first.generation)
            if first.timestamps:
                parameters["return_timestamps"] = first.timestamps
            if first.language:
                parameters["return_language"] = True
            if "prompt_ids" in parameters:
                parameters["prompt_ids"] = self._tensor(parameters["prompt_ids"])
            parameters["stopping_criteria"] = stop_when_cancelled(requests)
        if self._kind == "seq2seq_whisper":
            parameters["monitor_progress"] = partial(_require_client, requests)
            if first.scores:
                parameters |= {"output_scores": True, "return_dict_in_generate": True}
        chunks = [recording.chunks[index] for recording, index in group]
        before = monotonic_ns()
        try:
            with self._follow(first):
                outputs = _separated(
                    self._pipeline_for(first.timestamps).forward(_joined(chunks), **parameters), len(chunks)
                )
        except ConchError:  # all clients are gone
            return
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            failed = library_failure("recognition", error, of_request=first.seconds < SHORT)
            for recording, _ in group:
                recording.error = failed
            return
        frames = sum(_frames(chunk) for chunk in chunks)
        work.add(frames, frames, len(chunks))
        work.engine_ns += monotonic_ns() - before
        for (recording, index), output in zip(group, outputs, strict=True):
            recording.outputs[index] = output

    def _follow(self, recording: _Recording) -> AbstractContextManager[None]:
        """Follow the windows of a recording that is transcribed alone, if its client requested previews or scores."""
        preview = recording.request.preview if self._windows(recording) and recording.request.rows == 1 else None
        if preview is None and not recording.scores:
            return nullcontext()
        from conch.backends.tasks.windows import WindowFollower

        recording.follower = WindowFollower(self._pipeline, recording.scores, preview)
        return recording.follower.following()

    def _preview(self, group: list[tuple[_Recording, int]]) -> None:
        """Send the beginnings of texts whose chunks have run; transformers merges each chunk with the one before it."""
        if self._kind not in ("seq2seq_whisper", "ctc"):
            return
        for recording in {id(recording): recording for recording, _ in group}.values():
            preview, count = recording.request.preview, len(recording.outputs)
            if preview is None or recording.request.rows > 1 or count == len(recording.chunks):
                continue
            if set(recording.outputs) != set(range(count)) or not count:
                continue
            text, last = (
                self._pipeline.postprocess([dict(recording.outputs[index]) for index in range(start, count)])["text"]
                for start in (0, count - 1)
            )
            # The next chunk changes nothing before the last one, except within a word.
            preview(text[: len(text) - len(last)].rpartition(" ")[0])

    def _language(self, output: Mapping[str, Any]) -> str:
        """Return the name of the language of an output, empty if it was not requested.

        With ``return_language``, transformers 5.23 would shift the times of words by a token.
        """
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        if "lang_id" not in output:
            return ""
        token = self._pipeline.tokenizer.convert_ids_to_tokens(int(output["lang_id"]))
        return str(LANGUAGES.get(token[2:-2], token[2:-2]))

    def _tensor(self, tokens: tuple[int, ...]) -> Any:
        import torch

        return torch.tensor(tokens, device=self._pipeline.device)

    def _pipeline_for(self, timestamps: bool | str) -> Any:
        """Return the pipeline; for Whisper's word timestamps, a copy that shares the weights.

        transformers derives word timestamps from the attention and switches the model to an implementation that returns
        it. On a shared model this would change the computation of other threads.
        """
        if timestamps != "word" or self._kind != "seq2seq_whisper" or self._variant is not None:
            return self._pipeline
        with self._lock:
            if self._word_pipeline is None:
                model = self._pipeline.model
                shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
                self._word_pipeline = copy.copy(self._pipeline)
                self._word_pipeline.model = copy.deepcopy(model, shared)
                self._word_pipeline.model.set_attn_implementation("eager")
            return self._word_pipeline

    def _result(self, prepared: PreparedRequest) -> Result | ConchError:
        assert isinstance(prepared, PreparedSpeech)
        texts, chunks, languages = [], [], []
        for recording in prepared.recordings:
            if recording.error is not None:
                return recording.error
            if len(recording.outputs) < len(recording.chunks):
                return cancelled()
            outputs = [recording.outputs[index] for index in range(len(recording.chunks))]
            languages.append(self._language(outputs[0]))
            transcription = self._pipeline.postprocess(outputs, return_timestamps=recording.timestamps)
            texts.append(transcription["text"])
            wants_chunks = prepared.request.option("return_timestamps", "none") != "none"
            pieces = transcription.get("chunks", []) if wants_chunks else []
            described = [_chunk(piece, recording.seconds) for piece in pieces]
            if recording.scores and recording.follower is not None:
                for chunk, scores in zip(described, recording.follower.scores_of(len(pieces)), strict=False):
                    chunk |= asdict(scores)
            chunks.append(json.dumps(described, ensure_ascii=False))
        shape = (len(texts), 1)
        seconds = [[recording.seconds] for recording in prepared.recordings]
        return Result(
            {
                "text_output": Strings(shape, texts),
                "chunks": Strings(shape, chunks),
                "duration": np.array(seconds, np.float32),
                "language": Strings(shape, languages),
            }
        )


def served_variant(checkpoint: Checkpoint, device: str) -> Variant | None:
    """Return the converted variant that serves a checkpoint; None if transformers runs its weights in PyTorch.

    Raises UNSUPPORTED for a converted variant on a GPU.
    """
    engine, _, graph = choose(checkpoint, device.partition(":")[0])
    if checkpoint.variant is None or engine == "torch" or graph is None:
        return None
    if device != "cpu":
        raise unsupported(f"engine '{engine}' runs only on CPUs: set instance_group kind KIND_CPU, or engine torch")
    return checkpoint.variant


def open_pipeline(checkpoint: Checkpoint, variant: Variant | None, device: str = "cpu", instances: int = 1) -> Any:
    """Load the pipeline over a converted ``variant``, or without one over the checkpoint's own weights."""
    if variant is None:
        return load_pipeline("automatic-speech-recognition", checkpoint, device)
    extras.require(f"variant '{variant.name}' of '{checkpoint.source}'", "torch", "transformers", "openvino")
    from conch.backends.tasks import whisper

    threads = checkpoint.options.threads or usable_cores()
    settings = CompileSettings(threads=threads, instances=instances, precision=variant.precision)
    return whisper.load_pipeline(checkpoint, checkpoint.directory / variant.path, settings)


def _require_client(requests: Sequence[Request], _: Any) -> None:
    """Raise CANCELLED, before a window, if all of its requests are cancelled."""
    if all(request.cancelled for request in requests):
        raise cancelled()


def _raw(samples: media.Samples, rate: int) -> dict[str, Any]:
    """Return the pipeline's input for samples, a new dictionary because the pipeline modifies it."""
    return {"raw": samples, "sampling_rate": rate}


def _chunk(piece: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return an element of ``chunks``: a text with its times in seconds.

    A missing time is the start or end of the recording.
    """
    start, end = piece["timestamp"]
    return {
        "text": piece["text"],
        "start": round(float(start or 0.0), 3),
        "end": round(float(seconds if end is None else end), 3),
    }


def _frames(chunk: Mapping[str, Any]) -> int:
    """Estimate the number of encoder positions of a chunk: half its feature frames, or 1/320 of its samples."""
    shapes = [tuple(map(int, value.shape)) for value in chunk.values() if getattr(value, "ndim", 0) >= 2]
    return max(max(1, shape[-1] // (2 if len(shape) > 2 else 320)) for shape in shapes)


def _joined(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join chunks of equal shapes: tensors along the batch dimension, other values as lists."""
    import torch

    if len(chunks) == 1:
        return dict(chunks[0])
    return {
        name: torch.cat([chunk[name] for chunk in chunks])
        if isinstance(value, torch.Tensor)
        else [chunk[name] for chunk in chunks]
        for name, value in chunks[0].items()
    }


def _separated(outputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split the model's outputs into chunks: the inverse of ``_joined``."""
    if count == 1:
        return [dict(outputs)]
    return [
        {name: value[index : index + 1] if hasattr(value, "shape") else value[index] for name, value in outputs.items()}
        for index in range(count)
    ]
