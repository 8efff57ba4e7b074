"""Generates natural data: texts of a mix of lengths, images and sounds of typical sizes, labels, tables. Pure."""

from __future__ import annotations

import io
import json
import re
import wave
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from random import Random
from struct import pack
from typing import Final

import numpy as np

from conch.core.errors import invalid
from conch.core.inference import TensorSpec
from conch.core.tensors import ELEMENT_SIZE, pack_bytes
from conch.measure.perf.inputs.data import MOST_BYTES, DataOptions, Sample, SampleSet, Value, check_size, numbers
from conch.measure.perf.inputs.specs import Kind, ModelSpec, check_batch_size, inputs_of, kinds_of
from conch.measure.texts import builtin
from conch.measure.texts.shapes import Mix, Shape

# Texts are built from the sentences on which ``conch convert`` compares variants. Token counts are estimates: words and
# punctuation marks, 5 % more for words that tokenizers split, and the special tokens.


#: Default lengths of texts, and their share of the requests: queries and titles, sentences, passages.
DEFAULT_MIX: Final[Mix] = {
    Shape(1, 10): 0.2, Shape(1, 16): 0.25, Shape(1, 32): 0.25, Shape(1, 64): 0.15, Shape(1, 128): 0.1,
    Shape(1, 256): 0.05,
}  # fmt: skip
#: Special tokens of a text, and the tokens of its number.
_AROUND: Final = 5
_SPLIT: Final = 1.05
#: The longest of this many random sentences is taken, so that texts have few sentences, like written texts.
_TRIES: Final = 3
#: Each block of this many requests follows the mix, in random order.
_BLOCK: Final = 20
_TOKEN: Final = re.compile(r"\w+|[^\w\s]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")
#: The start of a text: senders find its number by the characters that follow.
_BEGINNING: Final = re.compile(r"[A-Za-z0-9 ,']{4,}")


def tokens_of(text: str) -> int:
    """Estimate the tokens of a numbered text.

    They are words and punctuation marks, 5 % more for words that tokenizers split, and two special tokens.
    """
    return round(_SPLIT * (_words(text) - 1)) + _AROUND


def shapes_of(mix: Mix, count: int, random: Random) -> list[Shape]:
    """Return the shapes of ``count`` requests; each block of twenty follows ``mix`` as closely as possible."""
    owed = dict.fromkeys(mix, 0.0)
    shapes = []
    for _ in range(count):
        for shape, share in mix.items():
            owed[shape] += share
        next_shape = max(owed, key=owed.__getitem__)
        owed[next_shape] -= 1
        shapes.append(next_shape)
    blocks = [shapes[start : start + _BLOCK] for start in range(0, count, _BLOCK)]
    for block in blocks:
        random.shuffle(block)
    return [shape for block in blocks for shape in block]


class TextWriter:
    """Writes texts of given lengths, from the sentences on which ``conch convert`` compares variants.

    Each begins with a six-digit number, which senders change from request to request.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._parts = _counted_parts()
        self._questions = [question for document in builtin.documents() for question in document.questions]

    def text(self, tokens: int) -> str:
        """A text of at most ``tokens`` tokens and only slightly fewer, with at least one short sentence."""
        shortest, _ = self._parts[0]
        left = max(int((tokens - _AROUND) / _SPLIT), shortest)
        parts: list[str] = []
        while left >= shortest:
            words, part = self._part(left)
            parts.append(part)
            left -= words
        return self._numbered(" ".join(parts))

    def question(self) -> str:
        """A question of 9 to 17 tokens."""
        return self._numbered(self._random.choice(self._questions))

    def _numbered(self, text: str) -> str:
        return f"{self._random.randrange(10**5, 10**6)} {text}"

    def _part(self, max_words: int) -> tuple[int, str]:
        """A sentence or a passage of at most ``max_words`` words, after its number of words."""
        fitting = bisect_left(self._parts, (max_words + 1,))
        return self._parts[max(self._random.randrange(fitting) for _ in range(_TRIES))]


@cache
def _counted_parts() -> Sequence[tuple[int, str]]:
    """The parts of texts after their numbers of words, the shortest first."""
    return sorted({(_words(part), part) for part in _parts() if _BEGINNING.match(part)})


def _parts() -> Iterator[str]:
    """Sentences, passages, and the sentences of passages."""
    yield from builtin.sentences()
    for passage in (*builtin.passages(), *(document.context for document in builtin.documents())):
        yield passage
        yield from _SENTENCE_END.split(passage)


def _words(text: str) -> int:
    return len(_TOKEN.findall(text))


# PNG and WAV files are written without media libraries.


#: Width and height of images (pixels), in rotation.
PICTURE_SIZES: Final = ((224, 224), (320, 240), (640, 480), (480, 640))
#: Lengths of sounds (s), in rotation.
SOUND_SECONDS: Final = (2, 4, 8, 15)
SAMPLING_RATE: Final = 16_000
#: Number of cells along each side of an image's smooth part.
_CELLS: Final = 9
#: Resonances of vowels (Hz), those in "father", "see", "moon", "bed" and "law".
_VOWELS: Final = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))
#: The width of a resonance (Hz), and the average length of a syllable (s).
_WIDTH: Final = 90.0
_SYLLABLE: Final = 0.22


def picture(width: int, height: int, random: np.random.Generator) -> bytes:
    """Return a PNG file with soft areas of colour and grain like a photograph: about one byte per pixel."""
    rows, columns = (np.linspace(0, _CELLS - 1, size) for size in (height, width))
    smooth = _resized(random.random((_CELLS, _CELLS, 3)) * 255, rows, columns)
    grain = np.rint(random.normal(0, 1.0, (height, width, 1)))
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    # Each row is preceded by its filter: 1, the difference from the pixel to the left.
    left = np.zeros_like(pixels)
    left[:, 1:] = pixels[:, :-1]
    filtered = (pixels - left).reshape(height, -1)
    body = zlib.compress(np.insert(filtered, 0, 1, axis=1).tobytes(), 1)
    header = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(kind, data) for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def sound(seconds: float, random: np.random.Generator) -> bytes:
    """Return a WAV file of one channel: vowel syllables of changing pitch with pauses, without words."""
    count = round(seconds * SAMPLING_RATE)
    samples = np.zeros(count)
    start = 0
    while start < count:
        length = min(count - start, round(_SYLLABLE * SAMPLING_RATE * random.uniform(0.6, 1.4)))
        if random.random() > 0.15:
            samples[start : start + length] = _syllable(length, random)
        start += length
    samples += random.normal(0, 0.002, count)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(SAMPLING_RATE)
        written.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _resized(grid: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Interpolate ``grid`` [cells, cells, 3] linearly at ``rows`` and ``columns``."""
    top, left = rows.astype(int).clip(0, _CELLS - 2), columns.astype(int).clip(0, _CELLS - 2)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    across = grid[:, left] * (1 - right) + grid[:, left + 1] * right
    pixels: np.ndarray = across[top] * (1 - down) + across[top + 1] * down
    return pixels


def _syllable(length: int, random: np.random.Generator) -> np.ndarray:
    """Return a vowel of ``length`` samples: the harmonics of a voice, weighted by its resonances."""
    pitch = random.uniform(95, 220)
    harmonics = pitch * np.arange(1, int(4000 / pitch))
    resonances = np.array(_VOWELS[random.integers(len(_VOWELS))])
    loudness = (1 / (1 + ((harmonics[:, None] - resonances) / _WIDTH) ** 2)).sum(axis=1) / np.sqrt(harmonics)
    # The sum of loudness[k] * sin(2π * harmonics[k] * t) is a polynomial of the fundamental, without sines.
    fundamental = np.exp(2j * np.pi * pitch * np.arange(length) / SAMPLING_RATE)
    voice = np.polyval(np.append(loudness[::-1], 0), fundamental).imag
    swell = np.sin(np.linspace(0, np.pi, length)).clip(0) ** 0.5
    samples: np.ndarray = 0.3 * swell * voice / (np.abs(voice).max() or 1.0)
    return samples


def _chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))


#: Number of different requests: with texts only, and with images or sounds, which are larger.
_REQUESTS: Final = 1024
_LARGE_REQUESTS: Final = 32
#: Maximum number of texts in all requests.
_MOST_TEXTS: Final = 16_384
#: Texts leave this fraction of a model's maximum length free, because token counts are estimates.
_FREE: Final = 0.05
#: The outputs of fill-mask. Its texts have BERT's and RoBERTa's mask; each model reads the other's as a word.
_FILL_MASK: Final = frozenset({"label", "score", "text_output"})
_MASKS: Final = "[MASK] <mask>"
_LABELS: Final = ("travel", "cooking", "technology")
_TABLE: Final = {"city": ["Oslo", "Lyon", "Porto"], "people": ["717710", "522250", "231800"]}


def natural_samples(model: ModelSpec, options: DataOptions) -> SampleSet:
    """Return requests of the options' mix; numeric inputs are random.

    Raises INVALID_ARG for a mix with texts longer than the model's maximum length, or with batches larger than it
    accepts.
    """
    return _Requests(model, options).samples()


class _Requests:
    """Generates the requests of one model."""

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
        self._generators: Mapping[Kind, Callable[[Shape, int], bytes]] = {
            "text": self._text, "second text": self._second_text, "labels": self._label, "table": self._table,
            "picture": self._picture, "sound": self._sound, "video": self._video,
        }  # fmt: skip
        #: Number of tokens in the texts of each sample.
        self._tokens: list[int] = []

    def samples(self) -> SampleSet:
        kinds, mix = set(self._kinds.values()), self._mix()
        max_requests = _LARGE_REQUESTS if kinds & {"picture", "sound"} else _REQUESTS
        room = min(_MOST_TEXTS // self._texts(), MOST_BYTES // self._bytes_of_numbers())
        shapes = shapes_of(mix, max(1, min(max_requests, room // max(shape.batch for shape in mix))), self._random)
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
        """Return the number of texts or files in an inference, at least 1."""
        counts = (prod(self._dims[name]) for name, kind in self._kinds.items() if kind != "numbers")
        return max(1, sum(counts))

    def _bytes_of_numbers(self) -> int:
        """Return the size of the numeric inputs of an inference, at least 1 (bytes)."""
        numeric = (spec for spec in self._specs if spec.datatype != "BYTES")
        return max(1, sum(ELEMENT_SIZE[spec.datatype] * prod(self._dims[spec.name]) for spec in numeric))

    def _mix(self) -> Mix:
        """Return the options' mix, or the default mix limited to the model's maximum length."""
        model, chosen = self._model, self._options.mix
        if not chosen:
            max_tokens = int((1 - _FREE) * model.max_length) or max(shape.tokens for shape in DEFAULT_MIX)
            mix: dict[Shape, float] = {}
            for shape, share in DEFAULT_MIX.items():
                shorter = Shape(shape.batch, min(shape.tokens, max_tokens))
                mix[shorter] = mix.get(shorter, 0.0) + share
            return mix
        for shape in chosen:
            check_batch_size(model, shape.batch, f"--expect {shape}")
            if model.max_length and shape.tokens > model.max_length:
                raise invalid(f"--expect {shape}: model '{model.name}' reads at most {model.max_length} tokens")
        if "text" not in self._kinds.values():
            raise invalid(f"--expect sets the lengths of texts, but model '{model.name}' takes no texts")
        return chosen

    def _dims_of(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the dims of an input; variable dimensions of texts and files have defaults and need no ``--shape``."""
        if self._kinds[spec.name] == "numbers" or spec.name in self._options.shapes:
            return self._model.shape_of(self._options.shapes, spec.name)
        variable = len(_LABELS) if self._kinds[spec.name] == "labels" else 1
        return tuple(variable if dim == -1 else dim for dim in spec.dims)

    def _sample(self, shape: Shape, number: int) -> Sample:
        """Return the data of one inference."""
        self._tokens.append(0)
        sample = {}
        for spec in self._specs:
            kind, dims = self._kinds[spec.name], self._dims[spec.name]
            if kind == "numbers":
                sample[spec.name] = Value(dims, numbers(spec.datatype, prod(dims), self._numbers))
            else:
                sample[spec.name] = Value(
                    dims, pack_bytes([self._generators[kind](shape, at) for at in range(prod(dims))])
                )
        return sample

    def _text(self, shape: Shape, at: int) -> bytes:
        if "second text" in self._kinds.values():
            return self._counted(self._writer.question())
        number, _, text = self._writer.text(shape.tokens - len(self._masks.split())).partition(" ")
        return self._counted(f"{number} {self._masks} {text}" if self._masks else f"{number} {text}")

    def _second_text(self, shape: Shape, at: int) -> bytes:
        """Return a text of the tokens that the first text leaves."""
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
        raise invalid(f"model '{self._model.name}' reads videos, for which there is no built-in data: use --input-data")

    def _described(self, kinds: set[Kind], batches: Sequence[int]) -> str:
        """Return a description of the requests' data."""
        parts = []
        if any(self._tokens):
            low, high = min(self._tokens), max(self._tokens)
            min_batch, max_batch = min(batches), max(batches)
            texts = "pairs of texts" if "second text" in kinds else "texts"
            if max_batch > 1:
                texts = f"{min_batch} to {max_batch} {texts}" if max_batch > min_batch else f"{max_batch} {texts}"
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
