"""Runs the samples of ``model_warmup`` on a new instance before it serves.

Called when a worker has been started, on the event loop; a sample that fails fails the load.
Source: Triton's model warmup.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from conch.config.problem import refuse
from conch.config.schema import ModelConfig, datatype
from conch.config.validate_instances import warmup_problems, warmup_size_problem
from conch.errors import ConchError, internal, invalid
from conch.inference import InferRequest, InferResponse
from conch.tensors import ELEMENT_SIZE, WireTensor
from conch.workers.host.execution import Execution
from conch.workers.host.process import WorkerProcess


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample: ``batch_size`` requests with these inputs, ``count`` times."""

    name: str
    batch_size: int
    count: int
    inputs: tuple[WireTensor, ...]


def read_samples(config: ModelConfig, directory: Path) -> list[WarmupSample]:
    """The samples of a model in ``directory``.

    Raises INVALID_ARG for an incomplete sample or too small a file, INTERNAL for one that cannot be read.
    """
    refuse(warmup_problems(config))
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
    if kind == "BYTES":
        return WireTensor(name, kind, shape, bytes(4 * prod(shape)))
    size = ELEMENT_SIZE[kind] * prod(shape)
    if value.WhichOneof("input_data_type") == "zero_data":
        return WireTensor(name, kind, shape, bytes(size))
    data = random.randbytes(size)
    return WireTensor(name, kind, shape, bytes(byte & 1 for byte in data) if kind == "BOOL" else data)


def _read(file: str, kind: str, shape: tuple[int, ...], directory: Path) -> bytes:
    folder = (directory / "warmup").resolve()
    path = (folder / file).resolve()
    if not path.is_relative_to(folder):
        raise internal(f"warmup data file '{file}' must be inside the folder 'warmup' of the model")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise internal(f"failed to read warmup data file '{file}': {error.strerror}") from error
    if kind == "BYTES":
        return data
    expected = ELEMENT_SIZE[kind] * prod(shape)
    if len(data) < expected:
        raise warmup_size_problem(file, expected, len(data))
    return data[:expected]
