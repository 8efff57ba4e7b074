"""Conversion of Whisper: exports judged by the word error rate of recordings.

Every variant transcribes the recordings with transformers' pipeline, as the server does. Only one variant and the
reference are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.tasks import media
from conch.backends.tasks.speech import open_pipeline
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.manifest import Contrast, Contrasts, Variant
from conch.convert.conversion import Conversion, Progress, kept, shortened
from conch.convert.footprint import Opening
from conch.convert.libraries import describe_error, silence_libraries
from conch.convert.measure import Run, timed
from conch.convert.plan import Plan
from conch.convert.sentences import read_rows
from conch.convert.speech import agreement, export
from conch.convert.verdict import REFERENCE, BuiltVariant, FailedVariant
from conch.core.errors import invalid
from conch.measure.texts.shapes import Shape

#: The engines and precisions for which Whisper can be converted. OpenVINO computes ``bf16`` from the file of ``fp32``.
BACKENDS: Final = ("torch", "openvino")
PRECISIONS: Final = ("int8", "bf16")
USUAL: Final = ("int8",)
EXPORT: Final = "openvino-fp32"
#: The measured numbers of windows that run together, and of tokens written for each.
BATCH_SIZES: Final = (1, 4)
TOKENS: Final = 64
#: The minimum number of words for judging precisions below fp32, because the rate is a mean over words.
MIN_WORDS: Final = 300
#: A reference with a higher word error rate is not informative.
MAX_REFERENCE_RATE: Final = 0.5
BUILT_IN: Final = Path(__file__).parent / "recordings" / "recordings.jsonl"


@dataclass(frozen=True, slots=True)
class Recordings:
    """Mono recordings at the model's sampling rate, and the spoken texts; no texts if one of them is not known."""

    samples: list[media.Samples]
    texts: list[str]


def load_recordings(file: Path, rate: int, *, english: bool = False) -> Recordings:
    """Load the recordings of a file with the columns ``audio``, a path beside it, and optionally ``text``.

    With ``english``, only rows whose column ``language`` is ``en`` or missing are read. Raises INVALID_ARG for a file
    or a recording that cannot be read.
    """
    rows = [row for row in read_rows(file) if not english or row.get("language", "en") == "en"]
    samples = []
    for number, row in enumerate(rows, 1):
        if not row.get("audio"):
            raise invalid(f"--data {file}: speech recognition needs the column 'audio', which row {number} lacks")
        path = file.parent / str(row["audio"])
        try:
            samples.append(media.audio(path.read_bytes(), rate, seconds=media.MAX_SECONDS, row=0))
        except OSError as error:
            raise invalid(f"--data {file}: {path} cannot be read: {error.strerror}") from None
    if not samples:
        raise invalid(f"--data {file} has no recordings for this model")
    texts = [str(row.get("text") or "") for row in rows]
    return Recordings(samples, texts if all(texts) else [])


class SpeechConversion(Conversion[Any, list[str]]):
    """Conversion judged by word error rates. A network is transformers' pipeline, its outputs are the transcripts."""

    in_memory_together = False
    advice = "serve the checkpoint directly (engine torch); --force accepts those that ran"

    def __init__(self, plan: Plan, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
        super().__init__(plan, checkpoint, folder, progress)
        self.engines = plan.engines if plan.backends else BACKENDS
        self.precisions = tuple(dict.fromkeys(plan.precisions if plan.quantize else USUAL))
        self._check()
        media.require_sound(checkpoint.task)
        with silence_libraries():
            self.reference = export.load(checkpoint)
        self.shapes = self._shapes()
        english = not getattr(self.reference.model.generation_config, "is_multilingual", True)
        rate = int(self.reference.feature_extractor.sampling_rate)
        self.recordings = load_recordings(plan.data or BUILT_IN, rate, english=english)
        self.sample_count = len(self.recordings.samples)
        seconds = sum(map(len, self.recordings.samples)) / rate
        self.compared_on = f"{self.sample_count} recordings ({seconds:.0f} s)"
        if plan.data is None:
            self.warn(["the built-in recordings are synthetic speech: provide your own recordings with --data"])

    def _check(self) -> None:
        if self.plan.layout == "triton":
            raise invalid("--layout triton is for encoders: leave it out for speech recognition")
        if self.plan.expect:
            raise invalid("--expect is for models with a single forward pass: leave it out for speech recognition")
        for backend in self.engines:
            if backend not in BACKENDS:
                raise invalid(f"--backend {backend} does not run a converted Whisper: choose from torch, openvino")
        if "openvino" not in self.engines:
            raise invalid("Whisper is converted for OpenVINO: add openvino to --backend")
        for precision in self.precisions:
            if precision not in PRECISIONS:
                raise invalid(f"--quantize {precision} is not supported for Whisper: choose from int8, bf16, none")

    def _shapes(self) -> list[Shape]:
        """Return the shapes to measure: windows, and tokens written for each."""
        most = int(self.reference.model.config.max_target_positions) // 2
        for length in self.plan.sequence_lengths:
            if length > most:
                raise invalid(f"--seq-len {length} is more than the model writes for a window: at most {most} tokens")
        lengths = self.plan.sequence_lengths or (min(TOKENS, most),)
        return sorted({Shape(batch, length) for batch in self.plan.batch_sizes or BATCH_SIZES for length in lengths})

    @property
    def serving_engines(self) -> frozenset[str]:
        """All engines of ``BACKENDS``."""
        return frozenset(BACKENDS)

    def build(self) -> list[BuiltVariant | FailedVariant]:
        """Export to OpenVINO, and make the other precisions from the export."""
        self.progress("exporting to OpenVINO")
        network = self.reference.model
        graphs = export.export(network)
        whole = self._written(graphs, "fp32")
        export.verify(self.folder / whole.name, network)
        built: list[BuiltVariant | FailedVariant] = [BuiltVariant(REFERENCE, "torch", "fp32", None), whole]
        for precision in self.precisions:
            if precision == "bf16":
                built.append(BuiltVariant("openvino-bf16", "openvino", "bf16", whole.path, EXPORT, whole.folders))
                continue
            self.progress(f"compressing weights to {precision}")
            try:
                built.append(self._written(graphs, precision, made_from=EXPORT))
            except Exception as error:  # an exception of a library that concerns one variant
                built.append(FailedVariant(f"openvino-{precision}", describe_error(error)))
        return built

    def _written(self, graphs: dict[str, Any], precision: str, made_from: str = "") -> BuiltVariant:
        name = f"openvino-{precision}"
        (self.folder / name).mkdir()
        decoder = export.write(graphs, self.folder / name, precision)
        return BuiltVariant(name, "openvino", precision, decoder, made_from, tuple(export.FOLDERS.values()))

    def evaluate(self, variant: BuiltVariant) -> tuple[Any, list[str]]:
        """Transcribe the recordings."""
        served = self._served(variant)
        pipeline = self.reference if served is None else opened(self.checkpoint, served)
        transcripts = [transcribe(pipeline, samples) for samples in self.recordings.samples]
        if variant.name == REFERENCE and self.recordings.texts:
            rate = agreement.word_errors(self.recordings.texts, transcripts).rate
            if rate > MAX_REFERENCE_RATE:
                self.warn([f"the checkpoint's own word error rate is {rate:.0%}: the figures are not reliable"])
        return pipeline, transcripts

    def opening(self, variant: BuiltVariant) -> Opening:
        return partial(open_and_transcribe, self.checkpoint, self._served(variant), self.recordings.samples[0])

    def _served(self, variant: BuiltVariant) -> Variant | None:
        """Return a variant as the server reads it, with an absolute path; None for the reference."""
        if variant.path is None:
            return None
        return replace(variant.to_manifest(self.folder), path=str(variant.path))

    def compare(
        self, precision: str, reference: list[str], transcripts: list[str]
    ) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
        """Compare word error rates; see :meth:`Conversion.compare`."""
        figures = agreement.compare(self.recordings.texts, reference, transcripts)
        missed = agreement.reasons(precision, figures)
        if precision != "fp32" and figures.words < MIN_WORDS:
            missed += (f"{figures.words} words are too few to judge {precision}: at least {MIN_WORDS} are needed",)
        return figures.to_json(), missed

    def contrast(self, reference: list[str], transcripts: list[str]) -> Contrasts:
        """Return the recordings whose transcripts differ most."""
        errors = agreement.word_errors(reference, transcripts)
        rates = [errors.of([index]) for index in range(len(reference))]
        texts = self.recordings.texts or [f"recording {index + 1}" for index in range(len(reference))]

        def describe(index: int) -> Contrast:
            return Contrast(
                shortened(texts[index]), shortened(reference[index]), shortened(transcripts[index]),
                round(rates[index], 4),
            )  # fmt: skip

        return kept("share of a recording's words that differ", np.array(rates), rates, describe)

    def runs(self, networks: Mapping[str, Any], shape: Shape) -> dict[str, Run]:
        """Return runs that transcribe windows, writing a fixed number of tokens for each."""
        return {name: self._run(pipeline, shape) for name, pipeline in networks.items()}

    def _run(self, pipeline: Any, shape: Shape) -> Run:
        import torch

        count = max(2, shape.batch)
        chosen = [self.recordings.samples[index % self.sample_count] for index in range(count)]
        extractor = pipeline.feature_extractor
        features = torch.cat([
            extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_features"]
            for samples in chosen
        ])  # fmt: skip
        # Each run has other windows than the one before, whose encoding may be kept.
        batches = cycle(features.roll(shift, 0)[: shape.batch] * (1 - 0.001 * shift) for shift in range(2))
        known = getattr(pipeline.model.generation_config, "lang_to_id", None) or {}
        language = {"language": next(iter(known))} if known else {}

        def write() -> None:
            with silence_libraries():
                pipeline.model.generate(
                    next(batches), min_new_tokens=shape.tokens, max_new_tokens=shape.tokens, **language
                )

        return timed(write)


def opened(checkpoint: Checkpoint, variant: Variant | None) -> Any:
    """Return the pipeline of a variant with an absolute path, or of the checkpoint's own weights."""
    with silence_libraries():
        return open_pipeline(checkpoint, variant)


def transcribe(pipeline: Any, samples: media.Samples) -> str:
    """Return the transcript of a recording; one that is longer than a window is transcribed window by window."""
    rate = pipeline.feature_extractor.sampling_rate
    long = len(samples) > pipeline.feature_extractor.n_samples
    with silence_libraries():
        text: str = pipeline({"raw": samples, "sampling_rate": rate}, return_timestamps=long)["text"]
    return text


def open_and_transcribe(checkpoint: Checkpoint, variant: Variant | None, samples: media.Samples) -> Any:
    """Return the pipeline of a variant after it has transcribed a recording."""
    pipeline = opened(checkpoint, variant)
    transcribe(pipeline, samples)
    return pipeline
