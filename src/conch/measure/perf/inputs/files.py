"""Reads the data of requests from files in perf_analyzer's formats; :func:`samples` returns data of any source.

Source of the formats: perf_analyzer's documentation, "Input Data".
"""

from __future__ import annotations

import base64
import json
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from conch.core.errors import ConchError, invalid
from conch.core.inference import TensorSpec
from conch.core.tensors import ELEMENT_SIZE, format_shape, pack_bytes, split_bytes
from conch.measure.perf.inputs.data import DataOptions, Sample, SampleSet, Value, made_up
from conch.measure.perf.inputs.natural import natural_samples
from conch.measure.perf.inputs.specs import ModelSpec, inputs_of
from conch.wire.json.tensor import from_json

_Tensor = TypeVar("_Tensor")


def samples(model: ModelSpec, options: DataOptions) -> SampleSet:
    """Return the samples to send, at least one.

    Raises INVALID_ARG if data is missing or does not fit, naming the input and its option, or the file and the entry.
    """
    if options.mix and not options.natural:
        raise invalid("--expect is the mix of natural texts: leave out --input-data, --string-data and --string-length")
    if options.made_up:
        texts = any(spec.datatype == "BYTES" for spec in inputs_of(model, options.shapes))
        return (
            natural_samples(model, options) if options.natural and (texts or options.mix) else made_up(model, options)
        )
    paths = [Path(source) for source in (options.source, *options.more)]
    if paths[0].is_dir() and len(paths) == 1:
        return SampleSet([_of_folder(model, paths[0], options.shapes)], [[0]], sent=f"the data of {paths[0]}")
    for path in paths:
        if not path.is_file():
            kind = "a folder, and only files can be given together" if path.is_dir() else "no such file"
            hint = "" if path.exists() else "; the other values are 'natural', 'random' and 'zero'"
            raise invalid(f"--input-data {path}: {kind}{hint}")
    sample_set = _joined([_of_file(model, path, options.shapes) for path in paths])
    return replace(sample_set, sent=f"the data of {', '.join(map(str, paths))}")


def _joined(parts: Sequence[SampleSet]) -> SampleSet:
    """Concatenate the samples of several files; if any file has expected outputs, other samples get empty ones."""
    joined: list[Sample] = []
    streams: list[Sequence[int]] = []
    expected: list[Mapping[str, bytes]] = []
    for part in parts:
        streams += [[number + len(joined) for number in stream] for stream in part.streams]
        expected += part.expected or [{} for _ in part.samples]
        joined += part.samples
    return SampleSet(joined, streams, expected if any(expected) else ())


def _of_folder(model: ModelSpec, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Sample:
    """Read one file per input, named like it: raw bytes, or one text per line (the whole file for a single text)."""
    sample = {}
    for name, spec in model.inputs.items():
        file = folder / name
        if not file.is_file():
            if spec.optional:
                continue
            raise invalid(f"--input-data {folder}: there is no file '{name}' with the data of that input")
        content = file.read_bytes()
        dims = model.shape_of(shapes, name)
        count = int(np.prod(dims, dtype=np.int64))
        if spec.datatype == "BYTES":
            lines = content.splitlines() if count != 1 else [content.removesuffix(b"\n")]
            if len(lines) != count:
                raise invalid(f"{file}: {len(lines)} lines, but BYTES {format_shape(dims)} takes {count}")
            sample[name] = Value(dims, pack_bytes(lines))
            continue
        expected = count * ELEMENT_SIZE[spec.datatype]
        if len(content) != expected:
            raise invalid(f"{file}: {len(content)} bytes, but {spec.datatype} {format_shape(dims)} takes {expected}")
        sample[name] = Value(dims, content)
    return sample


def _of_file(model: ModelSpec, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> SampleSet:
    """Read a JSON file: ``data`` is a list of entries, or of lists of entries, which are sequences.

    ``validation_data`` has the same form, with outputs instead of inputs.
    """
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise invalid(f"--input-data {file}: {error.strerror}") from None
    except ValueError as error:
        raise invalid(f"--input-data {file}: not JSON: {error}") from None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise invalid(f'--input-data {file}: expected {{"data": [{{"INPUT": [...]}}, ...]}}')
    streams = _streams(entries)
    loaded = [
        _of_entry(model, entry, shapes, f"{file}, entry {number}")
        for number, entry in enumerate(event for stream in streams for event in stream)
    ]
    numbers = iter(range(len(loaded)))
    placed = [[next(numbers) for _ in stream] for stream in streams]
    right = document.get("validation_data")
    if right is None:
        return SampleSet(loaded, placed)
    if not isinstance(right, list) or list(map(len, _streams(right))) != list(map(len, streams)):
        raise invalid(
            f"--input-data {file}: 'validation_data' must have the same form as 'data', with one entry for each"
        )
    expected = [
        _outputs_of(model, entry, f"{file}, entry {number} of validation_data")
        for number, entry in enumerate(event for stream in _streams(right) for event in stream)
    ]
    return SampleSet(loaded, placed, expected)


def _streams(entries: Sequence[Any]) -> list[list[Any]]:
    """Group entries by sequence; entries outside of lists form one sequence together."""
    alone = [entry for entry in entries if not isinstance(entry, list)]
    return ([alone] if alone else []) + [entry for entry in entries if isinstance(entry, list) and entry]


def _of_entry(model: ModelSpec, entry: Any, shapes: Mapping[str, tuple[int, ...]], where: str) -> Sample:
    sample = _tensors(model, "input", entry, where, lambda spec, value: _of_json(model, spec, value, shapes))
    missing = [name for name, spec in model.inputs.items() if not spec.optional and name not in sample]
    if missing:
        raise invalid(f"{where}: no data for the inputs {', '.join(missing)}")
    return sample


def _outputs_of(model: ModelSpec, entry: Any, where: str) -> Mapping[str, bytes]:
    return _tensors(model, "output", entry, where, _expected)


def _tensors(
    model: ModelSpec,
    kind: Literal["input", "output"],
    entry: Any,
    where: str,
    read: Callable[[TensorSpec, Any], _Tensor],
) -> dict[str, _Tensor]:
    """Read each tensor of an entry; raises INVALID_ARG for other entries, with the tensor and its position."""
    if not isinstance(entry, dict):
        raise invalid(f"{where}: not an object with the {kind}s' data")
    specs = model.inputs if kind == "input" else model.outputs
    tensors = {}
    for name, value in entry.items():
        if name not in specs:
            known = ", ".join(f"'{tensor}'" for tensor in specs)
            raise invalid(f"{where}: model '{model.name}' has no {kind} '{name}' (it has {known})")
        try:
            tensors[name] = read(specs[name], value)
        except ConchError as error:
            raise invalid(f"{where}, {kind} '{name}': {error.message}") from None
    return tensors


def _expected(spec: TensorSpec, value: Any) -> bytes:
    if isinstance(value, dict) and "b64" in value:
        content = _decoded(value["b64"])
        return content if spec.datatype != "BYTES" or _elements(content) else pack_bytes([content])
    values = value.get("content") if isinstance(value, dict) else value
    values = values if isinstance(values, list) else [values]
    return from_json(spec.name, spec.datatype, _count(values), values)


def _count(values: Any) -> int:
    return sum(map(_count, values)) if isinstance(values, list) else 1


def _of_json(model: ModelSpec, spec: TensorSpec, value: Any, shapes: Mapping[str, tuple[int, ...]]) -> Value:
    """Parse a value: a flat list, ``{"content": [...], "shape": [...]}``, or ``{"b64": "..."}``."""
    dims: tuple[int, ...] | None = None
    if isinstance(value, dict):
        if "shape" in value:
            dims = _given_dims(spec, value["shape"])
        if "b64" in value:
            return _of_base64(model, spec, value["b64"], dims, shapes)
        if "content" not in value:
            raise invalid("expected 'content' or 'b64'")
        value = value["content"]
    if not isinstance(value, list):
        value = [value]
    if dims is None:
        dims = _dims_for(model, spec, _count(value), shapes)
    count = int(np.prod(dims, dtype=np.int64)) if dims else 1
    if _count(value) != count:
        raise invalid(f"{_count(value)} values, but the shape {format_shape(dims)} takes {count}")
    return Value(dims, from_json(spec.name, spec.datatype, count, value))


def _given_dims(spec: TensorSpec, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(dim) is not int or dim < 0 for dim in shape):
        raise invalid("'shape' is not a list of dimensions")
    fits = len(shape) == len(spec.dims) and all(want in (-1, have) for want, have in zip(spec.dims, shape, strict=True))
    if not fits:
        raise invalid(f"the shape {format_shape(shape)} does not fit {format_shape(spec.dims)} (without the batch)")
    return tuple(shape)


def _of_base64(
    model: ModelSpec, spec: TensorSpec, text: Any, dims: tuple[int, ...] | None, shapes: Mapping[str, tuple[int, ...]]
) -> Value:
    content = _decoded(text)
    if spec.datatype == "BYTES":
        dims = dims or model.shape_of(shapes, spec.name)
        count = int(np.prod(dims, dtype=np.int64))
        if _elements(content) != count:
            if count != 1:
                raise invalid(f"the shape {format_shape(dims)} takes {count} elements, each after its length (4 bytes)")
            content = pack_bytes([content])
        return Value(dims, content)
    if dims is None:
        dims = _dims_for(model, spec, len(content) // ELEMENT_SIZE[spec.datatype], shapes)
    expected = int(np.prod(dims, dtype=np.int64)) * ELEMENT_SIZE[spec.datatype]
    if len(content) != expected:
        raise invalid(f"{len(content)} bytes, but {spec.datatype} {format_shape(dims)} takes {expected}")
    return Value(dims, content)


def _dims_for(model: ModelSpec, spec: TensorSpec, count: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the dims of ``count`` values; a single variable dimension follows from the count."""
    variable = [index for index, dim in enumerate(spec.dims) if dim == -1]
    if spec.name in shapes or len(variable) != 1:
        return model.shape_of(shapes, spec.name)
    rest = int(np.prod([dim for dim in spec.dims if dim != -1], dtype=np.int64))
    if not rest or count % rest:
        return model.shape_of(shapes, spec.name)
    return tuple(count // rest if dim == -1 else dim for dim in spec.dims)


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (Base64Error, TypeError, ValueError):
        raise invalid("'b64' is not base64") from None


def _elements(content: bytes) -> int:
    """Return the number of elements of a BYTES tensor in wire format, as in perf_analyzer; 0 for other content."""
    try:
        return len(split_bytes(content))
    except ConchError:
        return 0
