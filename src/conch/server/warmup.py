"""Runs the samples of ``model_warmup`` on a new instance before it serves.

Called when a worker has been started, on the event loop; a sample that fails fails the load.
Source: Triton's model warmup.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from conch.config.problem import refuse
from conch.config.reading import read_small
from conch.config.schema import ModelConfig, datatype
from conch.config.validate_instances import warmup_problems, warmup_size_problem
from conch.errors import ConchError, internal, invalid
from conch.inference import InferRequest, InferResponse
from conch.tensors import ELEMENT_SIZE, WireTensor
from conch.workers.host.execution import Execution
from conch.workers.host.process import WorkerProcess

#: What each request of a sample counts at least (bytes): it takes as much of the event loop's time as these.
_REQUEST_BYTES: Final = 4096
#: Random data is made in pieces of so many bytes, between which other threads run.
_PIECE: Final = 1 << 20
#: An empty text, as BYTES has it (bytes).
_EMPTY_TEXT: Final = 4
#: The truth of each byte, as BOOL has it.
_TRUTH: Final = bytes(byte & 1 for byte in range(256))
#: The most bytes of a file with data.
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample: ``batch_size`` requests with these inputs, ``count`` times."""

    name: str
    batch_size: int
    count: int
    inputs: tuple[WireTensor, ...]


def read_samples(config: ModelConfig, directory: Path, limit: int) -> list[WarmupSample]:
    """The samples of a model in ``directory``; to be called in a thread, as they may be large.

    Raises INVALID_ARG for an incomplete sample, one with more than ``limit`` bytes or too small a file, INTERNAL for
    a file that cannot be read.
    """
    refuse(warmup_problems(config))
    for setting in config.model_warmup:
        if setting.batch_size:
            size = sum(_size(value, config, directory) for value in setting.inputs.values())
            total = setting.batch_size * max(size, _REQUEST_BYTES)
            if total > limit:
                raise invalid(
                    f"warmup sample '{setting.name}' has {total} bytes in {setting.batch_size} requests; at most"
                    f" {limit} are allowed. Use --max-warmup-bytes to increase the limit."
                )
    return [
        WarmupSample(
            setting.name,
            setting.batch_size,
            max(setting.count, 1),
            tuple(_tensor(name, value, config, directory) for name, value in sorted(setting.inputs.items())),
        )
        for setting in config.model_warmup
        if setting.batch_size
    ]


async def warm_up(worker: WorkerProcess, config: ModelConfig, samples: list[WarmupSample]) -> None:
    """Run all samples on a worker.  Raises INVALID_ARG with what failed, after the last one."""
    outputs = tuple(output.name for output in config.output)
    failures = []
    for sample in samples:
        try:
            for _ in range(sample.count):
                await _run(worker, config.name, outputs, sample)
        except ConchError as error:
            failures.append(f"failed to run warmup sample '{sample.name}': {error.message}; ")
    if failures:
        raise invalid("".join(failures))


async def _run(worker: WorkerProcess, model: str, outputs: tuple[str, ...], sample: WarmupSample) -> None:
    """Execute a sample once; returns when all its requests have ended.  Raises the first error of a response."""
    left = sample.batch_size
    ended = asyncio.get_running_loop().create_future()

    def on_response(response: InferResponse) -> None:
        nonlocal left
        left -= response.final
        if response.error is not None and not ended.done():
            ended.set_exception(response.error)
        elif not left and not ended.done():
            ended.set_result(None)

    requests = [
        InferRequest(model, {tensor.name: tensor for tensor in sample.inputs}, on_response, outputs=outputs)
        for _ in range(sample.batch_size)
    ]
    worker.execute(requests, _ignore)
    await ended


def _ignore(execution: Execution) -> None:
    """Warming up is not counted."""


def _tensor(name: str, value: Any, config: ModelConfig, directory: Path) -> WireTensor:
    kind = datatype(value.data_type)
    batch = (1,) if config.max_batch_size > 0 else ()
    shape = (*batch, *value.dims)
    if value.WhichOneof("input_data_type") == "input_data_file":
        return WireTensor(name, kind, shape, _read(value.input_data_file, kind, shape, directory))
    size = ELEMENT_SIZE.get(kind, _EMPTY_TEXT) * prod(shape)
    if kind == "BYTES" or value.WhichOneof("input_data_type") == "zero_data":
        return WireTensor(name, kind, shape, bytes(size))
    return WireTensor(name, kind, shape, _random(size, kind))


def _random(size: int, kind: str) -> bytes:
    pieces = (os.urandom(min(_PIECE, size - start)) for start in range(0, size, _PIECE))
    return b"".join([piece.translate(_TRUTH) if kind == "BOOL" else piece for piece in pieces])


def _size(value: Any, config: ModelConfig, directory: Path) -> int:
    """The bytes of an input before they are made or read."""
    if value.WhichOneof("input_data_type") == "input_data_file":
        try:
            return _path(value.input_data_file, directory).stat().st_size
        except OSError:
            return 0  # reading it tells why
    count: int = prod(value.dims)
    return ELEMENT_SIZE.get(datatype(value.data_type), _EMPTY_TEXT) * count


def _path(file: str, directory: Path) -> Path:
    folder = (directory / "warmup").resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise internal(f"warmup data file '{file}' must be inside the folder 'warmup' of the model")
    return path


def _read(file: str, kind: str, shape: tuple[int, ...], directory: Path) -> bytes:
    try:
        data = read_small(_path(file, directory), _MOST_BYTES)
    except OSError as error:
        raise internal(f"failed to read warmup data file '{file}': {error.strerror}") from error
    if kind == "BYTES":
        return data
    expected = ELEMENT_SIZE[kind] * prod(shape)
    if len(data) < expected:
        raise warmup_size_problem(file, expected, len(data))
    return data[:expected]
