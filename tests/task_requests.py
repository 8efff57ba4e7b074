"""Tasks over the checkpoints of ``tests.task_checkpoints``, and requests to them, without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.base.arrays import DTYPES, Array, Request, Result
from conch.backends.tasks.huggingface_backend import EngineOpener, make_task
from conch.backends.tasks.task import ExecutionWork, Task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from conch.core.tensors import WireTensor, pack_bytes

NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


def open_task(folder: Path, open_engine: Callable[..., Any] | None = None, **options: Any) -> Task:
    """The task that the backend would make of a checkpoint."""
    checkpoint = Checkpoint.open(folder, Options.from_values(options))
    return make_task(checkpoint, open_engine or _no_engine)


def open_model(folder: Path, **options: Any) -> Task:
    """The task of a checkpoint, on the engines that serve it."""
    checkpoint = Checkpoint.open(folder, Options.from_values(options))
    return make_task(checkpoint, EngineOpener(checkpoint, {"kind": "CPU", "device_id": 0, "count": 1}))


def array(result: Result, name: str) -> Array:
    """An output that is an array, not texts."""
    value = result.outputs[name]
    assert isinstance(value, np.ndarray)
    return value


def ask(inputs: Mapping[str, Any], outputs: Sequence[str] = (), **options: Any) -> Request:
    """A request: each of ``inputs`` an array, or rows of ``str`` or ``bytes`` (``options``: for every row the same)."""
    tensors = {name: tensor(name, value) for name, value in inputs.items()}
    rows = next(iter(tensors.values())).shape[0]
    for name, value in options.items():
        values = [value] * rows
        tensors[name] = tensor(name, values if isinstance(value, str) else scalars(value, rows))
    return Request(tensors, frozenset(outputs))


def previewed(request: Request) -> list[str]:
    """The texts that ``request`` sends before its response, as they come."""
    sent: list[str] = []
    request.preview = sent.append
    return sent


def scalars(value: Any, rows: int) -> np.ndarray[Any, Any]:
    dtype = np.bool_ if isinstance(value, bool) else np.int32 if isinstance(value, int) else np.float32
    return np.full((rows, 1), value, dtype)


def tensor(name: str, value: Any) -> WireTensor:
    """An array, or a list of rows of strings or of lists of strings, as a tensor."""
    if isinstance(value, np.ndarray):
        return WireTensor(name, NAMES[value.dtype], value.shape, np.ascontiguousarray(value).tobytes())
    rows = [row if isinstance(row, list) else [row] for row in value]
    elements = [one.encode() if isinstance(one, str) else one for row in rows for one in row]
    return WireTensor(name, "BYTES", (len(rows), len(rows[0]) if rows else 1), pack_bytes(elements))


def answers(task: Task, *requests: Request) -> list[Result | ConchError]:
    """What ``task`` answers to ``requests`` as one batch."""
    return task.execute([task.prepare(request) for request in requests], ExecutionWork())


def texts(task: Task, *requests: Request, output: str = "text_output") -> list[list[str]]:
    """The texts that each request gets; an error is raised."""
    found = []
    for answer in answers(task, *requests):
        if isinstance(answer, ConchError):
            raise answer
        found.append(list(answer.outputs[output].elements))  # type: ignore[union-attr]
    return found


def _no_engine(head: str) -> Any:
    raise AssertionError(f"the task asked for an engine with {head}")
