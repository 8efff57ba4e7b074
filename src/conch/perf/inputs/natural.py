"""Natural data: texts of a mix of lengths, pictures and sounds of usual sizes, labels, tables.  Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from random import Random
from typing import Final

import numpy as np

from conch.errors import invalid
from conch.perf.inputs.data import MOST_BYTES, DataOptions, Sample, SampleSet, Value, check_size, numbers
from conch.perf.inputs.kinds import Kind, inputs_of, kinds_of
from conch.perf.inputs.media import PICTURE_SIZES, SOUND_SECONDS, picture, sound
from conch.perf.inputs.specs import InputSpec, ModelSpec, check_batch_size
from conch.perf.inputs.texts import DEFAULT_MIX, TextWriter, shapes_of, tokens_of
from conch.tensors import ELEMENT_SIZE, pack_bytes
from conch.texts.shapes import Mix, Shape

#: How many different requests there are: of texts, and of pictures and sounds, which are larger.
_REQUESTS: Final = 1024
_LARGE_REQUESTS: Final = 32
#: The most texts in all requests together.
_MOST_TEXTS: Final = 16_384
#: Texts leave this share of a model's maximum length free: lengths are estimates.
_FREE: Final = 0.05
#: The outputs of fill-mask, whose texts need a mask: BERT's or RoBERTa's, to each of which the other's is a word.
_FILL_MASK: Final = frozenset({"label", "score", "text_output"})
_MASKS: Final = "[MASK] <mask>"
_LABELS: Final = ("travel", "cooking", "technology")
_TABLE: Final = {"city": ["Oslo", "Lyon", "Porto"], "people": ["717710", "522250", "231800"]}


def natural_samples(model: ModelSpec, options: DataOptions) -> SampleSet:
    """Requests of the options' mix; numbers are random.

    Raises INVALID_ARG for a mix with texts that are longer than the model reads, or with more than it takes.
    """
    return _Requests(model, options).samples()


class _Requests:
    """Makes the requests of one model."""

    def __init__(self, model: ModelSpec, options: DataOptions) -> None:
        self._model = model
        self._options = options
        self._specs = inputs_of(model, options.shapes)
        self._kinds = kinds_of(self._specs)
        self._dims = {spec.name: self._dims_of(spec) for spec in self._specs}
        for spec in self._specs:
            check_size(spec, self._dims[spec.name], options)
        self._random = Random(options.seed)
        self._numbers = np.random.default_rng(options.seed)
        self._writer = TextWriter(self._random)
        self._masks = _MASKS if frozenset(model.outputs) == _FILL_MASK else ""
        self._made: Mapping[Kind, Callable[[Shape, int], bytes]] = {
            "text": self._text, "second text": self._second_text, "labels": self._label, "table": self._table,
            "picture": self._picture, "sound": self._sound, "video": self._video,
        }  # fmt: skip
        #: How many tokens the texts of each sample have.
        self._tokens: list[int] = []

    def samples(self) -> SampleSet:
        kinds, mix = set(self._kinds.values()), self._mix()
        most = _LARGE_REQUESTS if kinds & {"picture", "sound"} else _REQUESTS
        room = min(_MOST_TEXTS // self._texts(), MOST_BYTES // self._bytes_of_numbers())
        shapes = shapes_of(mix, max(1, min(most, room // max(shape.batch for shape in mix))), self._random)
        samples: list[Sample] = []
        requests: list[Sequence[int]] = []
        for shape in shapes:
            requests.append(range(len(samples), len(samples) + shape.batch))
            for _ in range(shape.batch):
                samples.append(self._sample(shape, len(samples)))
        return SampleSet(
            samples,
            [range(len(samples))],
            requests=requests if self._options.mix else (),
            sent=self._described(kinds, [shape.batch for shape in shapes]),
            numbered=next((name for name, kind in self._kinds.items() if kind == "text"), ""),
        )

    def _texts(self) -> int:
        """How many texts or files an inference has, 1 at least."""
        counts = (prod(self._dims[name]) for name, kind in self._kinds.items() if kind != "numbers")
        return max(1, sum(counts))

    def _bytes_of_numbers(self) -> int:
        """The size of the other inputs of an inference, 1 at least."""
        numeric = (spec for spec in self._specs if spec.datatype != "BYTES")
        return max(1, sum(ELEMENT_SIZE[spec.datatype] * prod(self._dims[spec.name]) for spec in numeric))

    def _mix(self) -> Mix:
        """The options' mix, or the usual one with no texts that are longer than the model reads."""
        model, given = self._model, self._options.mix
        if not given:
            most = int((1 - _FREE) * model.max_length) or max(shape.tokens for shape in DEFAULT_MIX)
            mix: dict[Shape, float] = {}
            for shape, share in DEFAULT_MIX.items():
                shorter = Shape(shape.batch, min(shape.tokens, most))
                mix[shorter] = mix.get(shorter, 0.0) + share
            return mix
        for shape in given:
            check_batch_size(model, shape.batch, f"--expect {shape}")
            if model.max_length and shape.tokens > model.max_length:
                raise invalid(f"--expect {shape}: model '{model.name}' reads {model.max_length} tokens at most")
        if "text" not in self._kinds.values():
            raise invalid(f"--expect gives the lengths of texts, and model '{model.name}' takes none")
        return given

    def _dims_of(self, spec: InputSpec) -> tuple[int, ...]:
        """The dims of an input.  Texts need no ``--shape``: of a model that takes any number, a request has one."""
        if self._kinds[spec.name] == "numbers" or spec.name in self._options.shapes:
            return self._model.shape_of(self._options.shapes, spec.name)
        variable = len(_LABELS) if self._kinds[spec.name] == "labels" else 1
        return tuple(variable if dim == -1 else dim for dim in spec.dims)

    def _sample(self, shape: Shape, number: int) -> Sample:
        """The data of one inference."""
        self._tokens.append(0)
        sample = {}
        for spec in self._specs:
            kind, dims = self._kinds[spec.name], self._dims[spec.name]
            if kind == "numbers":
                sample[spec.name] = Value(dims, numbers(spec.datatype, prod(dims), self._numbers))
            else:
                sample[spec.name] = Value(dims, pack_bytes([self._made[kind](shape, at) for at in range(prod(dims))]))
        return sample

    def _text(self, shape: Shape, at: int) -> bytes:
        if "second text" in self._kinds.values():
            return self._counted(self._writer.question())
        number, _, text = self._writer.text(shape.tokens - len(self._masks.split())).partition(" ")
        return self._counted(f"{number} {self._masks} {text}" if self._masks else f"{number} {text}")

    def _second_text(self, shape: Shape, at: int) -> bytes:
        """A text of as many tokens as the first one has left."""
        return self._counted(self._writer.text(shape.tokens - self._tokens[-1]))

    def _counted(self, text: str) -> bytes:
        self._tokens[-1] += tokens_of(text)
        return text.encode()

    def _label(self, shape: Shape, at: int) -> bytes:
        return _LABELS[at % len(_LABELS)].encode()

    def _table(self, shape: Shape, at: int) -> bytes:
        return json.dumps(_TABLE).encode()

    def _picture(self, shape: Shape, at: int) -> bytes:
        return picture(*PICTURE_SIZES[len(self._tokens) % len(PICTURE_SIZES)], self._numbers)

    def _sound(self, shape: Shape, at: int) -> bytes:
        return sound(SOUND_SECONDS[len(self._tokens) % len(SOUND_SECONDS)], self._numbers)

    def _video(self, shape: Shape, at: int) -> bytes:
        raise invalid(f"model '{self._model.name}' takes videos, of which there are none here: give --input-data")

    def _described(self, kinds: set[Kind], batches: Sequence[int]) -> str:
        """A description of the requests' data in words."""
        parts = []
        if any(self._tokens):
            low, high = min(self._tokens), max(self._tokens)
            fewest, most = min(batches), max(batches)
            texts = "pairs of texts" if "second text" in kinds else "texts"
            if most > 1:
                texts = f"{fewest} to {most} {texts}" if most > fewest else f"{most} {texts}"
            parts.append(f"{texts} of {low} to {high} tokens" if high > low else f"{texts} of {low} tokens")
        if "labels" in kinds:
            parts.append(f"{len(_LABELS)} labels")
        if "table" in kinds:
            parts.append("a table")
        if "picture" in kinds:
            smallest, largest = min(PICTURE_SIZES, key=prod), max(PICTURE_SIZES, key=prod)
            parts.append("images of {}x{} to {}x{} pixels".format(*smallest, *largest))
        if "sound" in kinds:
            parts.append(f"synthetic voices of {SOUND_SECONDS[0]} to {SOUND_SECONDS[-1]} s")
        if "numbers" in kinds:
            parts.append("random numbers")
        return ", ".join(parts)
