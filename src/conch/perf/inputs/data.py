"""The data of requests: made up, or read from files in perf_analyzer's formats.

``samples`` is the only way in.  A sample is the data of one inference, by input; those of a batch are put one behind
the other.  Source of the formats: perf_analyzer's documentation, "Input Data".
"""

from __future__ import annotations

import base64
import json
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.errors import ConchError, invalid
from conch.perf.inputs.specs import InputSpec, ModelSpec
from conch.tensors import ELEMENT_SIZE, format_shape, pack_bytes
from conch.wire.json.tensor import from_json

#: How many different samples are made up: more than caches of small models hold, fewer than fill memory.
MADE_UP: Final = 64
#: How many bytes made-up samples may take together.
_MOST_BYTES: Final = 256 << 20
_LETTERS: Final = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", np.uint8)


@dataclass(frozen=True, slots=True)
class Value:
    """The data of one input in one inference: ``dims`` have no batch dimension, ``data`` is as it travels."""

    dims: tuple[int, ...]
    data: bytes


Sample = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Where data comes from: ``source`` is ``random``, ``zero``, or a file or folder.

    ``shapes`` are dims by input, ``string_data`` is the text of every BYTES element, or else each has
    ``string_length`` random letters.
    """

    source: str = "random"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    string_data: str | None = None
    string_length: int = 128
    seed: int = 0


def samples(model: ModelSpec, options: DataOptions) -> list[Sample]:
    """The samples that requests send in turn, at least one.

    Raises INVALID_ARG, naming the input and how to give it, where data is missing or does not fit.
    """
    shapes = options.shapes
    if options.source in ("random", "zero"):
        return _made_up(model, options, shapes)
    path = Path(options.source)
    if path.is_dir():
        return [_of_folder(model, path, shapes)]
    return _of_file(model, path, shapes)


def _made_up(model: ModelSpec, options: DataOptions, shapes: Mapping[str, tuple[int, ...]]) -> list[Sample]:
    random = np.random.default_rng(options.seed)
    needed = {name: spec for name, spec in model.inputs.items() if not spec.optional or name in shapes}
    dims = {name: model.shape_of(shapes, name) for name in needed}
    fixed = options.source == "zero" and not any(spec.datatype == "BYTES" for spec in needed.values())
    one = {name: _value(spec, dims[name], options, random) for name, spec in needed.items()}
    size = sum(len(value.data) for value in one.values())
    count = 1 if fixed or not size else max(1, min(MADE_UP, _MOST_BYTES // size))
    more = [
        {name: _value(spec, dims[name], options, random) for name, spec in needed.items()} for _ in range(count - 1)
    ]
    return [one, *more]


def _value(spec: InputSpec, dims: tuple[int, ...], options: DataOptions, random: np.random.Generator) -> Value:
    count = int(np.prod(dims, dtype=np.int64)) if dims else 1
    if spec.datatype == "BYTES":
        if options.string_data is not None:
            texts = [options.string_data.encode()] * count
        elif options.source == "zero":
            texts = [b""] * count
        else:
            texts = [random.choice(_LETTERS, options.string_length).tobytes() for _ in range(count)]
        return Value(dims, pack_bytes(texts))
    if options.source == "zero":
        return Value(dims, bytes(count * ELEMENT_SIZE[spec.datatype]))
    return Value(dims, _random_numbers(spec.datatype, count, random))


def _random_numbers(datatype: str, count: int, random: np.random.Generator) -> bytes:
    """Floats from 0 to 1, integers of the whole range but no more than fits ids of vocabularies, 0 or 1 for BOOL."""
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


def _of_folder(model: ModelSpec, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Sample:
    """A file for each input, named as it is: raw bytes, or the text of its only element."""
    sample = {}
    for name, spec in model.inputs.items():
        file = folder / name
        if not file.is_file():
            if spec.optional:
                continue
            raise invalid(f"--input-data {folder}: there is no file '{name}' with the data of that input")
        content = file.read_bytes()
        dims = model.shape_of(shapes, name)
        if spec.datatype == "BYTES":
            sample[name] = Value(dims, pack_bytes([content]))
            continue
        expected = int(np.prod(dims, dtype=np.int64)) * ELEMENT_SIZE[spec.datatype]
        if len(content) != expected:
            raise invalid(f"{file}: {len(content)} bytes, and {spec.datatype} {format_shape(dims)} takes {expected}")
        sample[name] = Value(dims, content)
    return sample


def _of_file(model: ModelSpec, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[Sample]:
    """The entries of ``data`` in a JSON file; a list of entries in it is a sequence, whose entries are sent in turn."""
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise invalid(f"--input-data {file}: {error.strerror}") from None
    except ValueError as error:
        raise invalid(f"--input-data {file}: not JSON: {error}") from None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise invalid(f'--input-data {file}: expected {{"data": [{{"INPUT": [...]}}, ...]}}')
    flat: list[Any] = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
    return [_of_entry(model, entry, shapes, f"{file}, entry {number}") for number, entry in enumerate(flat)]


def _of_entry(model: ModelSpec, entry: Any, shapes: Mapping[str, tuple[int, ...]], where: str) -> Sample:
    if not isinstance(entry, dict):
        raise invalid(f"{where}: not an object with the inputs' data")
    sample = {}
    for name, given in entry.items():
        spec = model.inputs.get(name)
        if spec is None:
            raise invalid(f"{where}: model '{model.name}' has no input '{name}'")
        try:
            sample[name] = _of_json(model, spec, given, shapes)
        except ConchError as error:
            raise invalid(f"{where}, input '{name}': {error.message}") from None
    missing = [name for name, spec in model.inputs.items() if not spec.optional and name not in sample]
    if missing:
        raise invalid(f"{where}: no data for the inputs {', '.join(missing)}")
    return sample


def _of_json(model: ModelSpec, spec: InputSpec, given: Any, shapes: Mapping[str, tuple[int, ...]]) -> Value:
    """One value: a flat list, ``{"content": [...], "shape": [...]}``, or ``{"b64": "..."}``."""
    dims: tuple[int, ...] | None = None
    if isinstance(given, dict):
        if "shape" in given:
            dims = tuple(int(dim) for dim in given["shape"])
        if "b64" in given:
            return Value(dims or model.shape_of(shapes, spec.name), _decoded(spec, given["b64"]))
        if "content" not in given:
            raise invalid("expected 'content' or 'b64'")
        given = given["content"]
    if not isinstance(given, list):
        given = [given]
    if dims is None:
        dims = _dims_for(model, spec, len(given), shapes)
    count = int(np.prod(dims, dtype=np.int64)) if dims else 1
    return Value(dims, from_json(spec.name, spec.datatype, count, given))


def _dims_for(model: ModelSpec, spec: InputSpec, count: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The dims of ``count`` values: where a single dimension is variable, there is only one that fits."""
    variable = [place for place, dim in enumerate(spec.dims) if dim == -1]
    if spec.name in shapes or len(variable) != 1:
        return model.shape_of(shapes, spec.name)
    rest = int(np.prod([dim for dim in spec.dims if dim != -1], dtype=np.int64))
    if not rest or count % rest:
        return model.shape_of(shapes, spec.name)
    return tuple(count // rest if dim == -1 else dim for dim in spec.dims)


def _decoded(spec: InputSpec, text: Any) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (Base64Error, TypeError, ValueError):
        raise invalid("'b64' is not base64") from None
    return pack_bytes([content]) if spec.datatype == "BYTES" else content


def in_batches(found: Sequence[Sample], batch_size: int) -> list[list[Sample]]:
    """Samples for requests of ``batch_size`` inferences each, every sample the same number of times if that can be."""
    if batch_size == 1:
        return [[one] for one in found]
    count = len(found)
    return [[found[(start + offset) % count] for offset in range(batch_size)] for start in range(0, count, batch_size)]
