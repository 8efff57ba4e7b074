"""The data of requests: its options, and zeros or random values in the shapes of the model.

A sample is the data of one inference, by input; the samples of a batch are concatenated. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeVar

import numpy as np

from conch.core.errors import invalid
from conch.core.inference import TensorSpec
from conch.core.tensors import ELEMENT_SIZE, format_shape, pack_bytes
from conch.measure.perf.inputs.specs import ModelSpec, inputs_of
from conch.measure.texts.shapes import Mix

#: Number of different generated samples: more than caches of small models hold, few enough for memory.
MADE_UP: Final = 64
#: Maximum size of all generated samples (bytes).
MOST_BYTES: Final = 256 << 20
#: Maximum size of a protocol buffers message, and so of a gRPC request (bytes).
_MOST_OF_A_REQUEST: Final = 2 << 30
#: Default length of random texts, as in perf_analyzer.
_STRING_LENGTH: Final = 128
_LETTERS: Final = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", np.uint8)


@dataclass(frozen=True, slots=True)
class Value:
    """The data of one input in one inference: ``dims`` without the batch dimension, ``data`` in wire format."""

    dims: tuple[int, ...]
    data: bytes


Sample = Mapping[str, Value]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The samples to send, in rotation; ``streams`` are the numbers of the samples in each sequence.

    ``expected`` are the expected outputs of each sample, by output, in wire format; empty if unknown. ``requests`` are
    the numbers of the samples in each request, if the data determines it. ``sent`` describes the data. ``numbered`` is
    the input whose texts begin with a number that senders may change (empty: none).
    """

    samples: Sequence[Sample]
    streams: Sequence[Sequence[int]]
    expected: Sequence[Mapping[str, bytes]] = ()
    requests: Sequence[Sequence[int]] = ()
    sent: str = ""
    numbered: str = ""

    def batches(self, size: int) -> list[list[Sample]]:
        """Return the samples of each request: ``size`` of them unless the data determines it."""
        if self.requests:
            return [[self.samples[number] for number in request] for request in self.requests]
        return in_batches(self.samples, size)


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The source of the data: ``natural``, ``random``, ``zero``, or a file or folder; ``more`` are further files.

    ``shapes`` are dims by input. ``string_data`` is the text of every BYTES element; with ``string_length``, each has
    that many random letters. ``mix`` is the mix of natural texts (empty: the default).
    """

    source: str = "natural"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    string_data: str | None = None
    string_length: int = 0
    seed: int = 0
    more: Sequence[str] = ()
    mix: Mix = field(default_factory=dict)

    @property
    def made_up(self) -> bool:
        """Whether the data is generated rather than read from files."""
        return self.source in ("natural", "random", "zero") and not self.more

    @property
    def natural(self) -> bool:
        """Whether texts, images and sounds are natural rather than random."""
        return self.source == "natural" and not self.more and self.string_data is None and not self.string_length


def made_up(model: ModelSpec, options: DataOptions) -> SampleSet:
    """Return samples of zeros or random values; raises INVALID_ARG for an input whose shape must be given."""
    random = np.random.default_rng(options.seed)
    needed = inputs_of(model, options.shapes)
    dims = {spec.name: model.shape_of(options.shapes, spec.name) for spec in needed}
    for spec in needed:
        check_size(spec, dims[spec.name], options)
    fixed = options.source == "zero" and not any(spec.datatype == "BYTES" for spec in needed)
    first = {spec.name: _value(spec, dims[spec.name], options, random) for spec in needed}
    size = sum(len(value.data) for value in first.values())
    count = 1 if fixed or not size else max(1, min(MADE_UP, MOST_BYTES // size))
    more = [{spec.name: _value(spec, dims[spec.name], options, random) for spec in needed} for _ in range(count - 1)]
    return SampleSet([first, *more], [range(count)], sent=_described(needed, options))


def _described(specs: Sequence[TensorSpec], options: DataOptions) -> str:
    """Return a description of the data."""
    texts = [spec for spec in specs if spec.datatype == "BYTES"]
    parts = []
    if texts and options.string_data is not None:
        parts.append("always the same text")
    elif texts and options.source == "zero":
        parts.append("empty texts")
    elif texts:
        parts.append(f"texts of {options.string_length or _STRING_LENGTH} random letters")
    if len(texts) < len(specs):
        parts.append("zeros" if options.source == "zero" else "random numbers")
    return ", ".join(parts)


def check_size(spec: TensorSpec, dims: tuple[int, ...], options: DataOptions) -> None:
    """Raise INVALID_ARG for a tensor larger than any request, before memory is allocated for it."""
    element_size = ELEMENT_SIZE.get(spec.datatype, 0)
    if spec.datatype == "BYTES":
        length = options.string_length or _STRING_LENGTH
        element_size = 4 + (len(options.string_data.encode()) if options.string_data is not None else length)
    size = prod(dims) * element_size
    if size > _MOST_OF_A_REQUEST:
        raise invalid(
            f"input '{spec.name}' would have {size / 2**30:,.1f} GiB in the shape {format_shape(dims)}: a request"
            f" can have at most {_MOST_OF_A_REQUEST >> 30} GiB"
        )


def _value(spec: TensorSpec, dims: tuple[int, ...], options: DataOptions, random: np.random.Generator) -> Value:
    count = prod(dims)
    if spec.datatype == "BYTES":
        if options.string_data is not None:
            texts = [options.string_data.encode()] * count
        elif options.source == "zero":
            texts = [b""] * count
        else:
            length = options.string_length or _STRING_LENGTH
            texts = [random.choice(_LETTERS, length).tobytes() for _ in range(count)]
        return Value(dims, pack_bytes(texts))
    if options.source == "zero":
        return Value(dims, bytes(count * ELEMENT_SIZE[spec.datatype]))
    return Value(dims, numbers(spec.datatype, count, random))


def numbers(datatype: str, count: int, random: np.random.Generator) -> bytes:
    """Return random floats from 0 to 1, integers below 1000 (valid vocabulary ids), or 0 or 1 for BOOL."""
    if datatype == "BOOL":
        return random.integers(0, 2, count, np.uint8).tobytes()
    if datatype in ("FP32", "FP64"):
        return random.random(count).astype("<f4" if datatype == "FP32" else "<f8").tobytes()
    if datatype == "FP16":
        return random.random(count).astype("<f2").tobytes()
    if datatype == "BF16":
        upper = random.random(count).astype("<f4").view("<u4") >> 16
        return upper.astype("<u2").tobytes()
    kind = np.dtype(f"<{'u' if datatype.startswith('U') else 'i'}{ELEMENT_SIZE[datatype]}")
    return random.integers(0, min(np.iinfo(kind).max, 1000), count).astype(kind).tobytes()


def in_batches(samples: Sequence[_T], batch_size: int) -> list[list[_T]]:
    """Group samples into requests of ``batch_size`` inferences; the first samples fill up the last request."""
    if batch_size == 1:
        return [[sample] for sample in samples]
    count = len(samples)
    return [
        [samples[(start + offset) % count] for offset in range(batch_size)] for start in range(0, count, batch_size)
    ]
