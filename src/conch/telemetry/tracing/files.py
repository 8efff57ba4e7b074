"""Trace files in Triton's format: arrays of JSON objects, each about one request.

Settings with the same file name share a ``TraceFile``. A single thread writes the traces in order, never the event
loop.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from conch.core.errors import ConchError
from conch.core.tensors import ELEMENT_SIZE, NATIVE_FORMAT, WireTensor, split_bytes
from conch.machine.threads import LastingExecutor
from conch.telemetry.tracing.trace import Trace, TracedRequest


def data_text(tensor: WireTensor) -> str:
    """Format the elements with commas between them: numbers as C++ prints them, strings in quotes.

    Empty for FP16 and BF16, as in Triton. Invalid UTF-8 is shown as replacement characters.
    """
    if tensor.datatype == "BYTES":
        try:
            elements = split_bytes(tensor.data)
        except ConchError:
            return ""
        return ",".join(f'"{element.decode("utf-8", "replace")}"' for element in elements)
    code = NATIVE_FORMAT.get(tensor.datatype)
    if code is None:
        return ""
    count = len(tensor.data) // ELEMENT_SIZE[tensor.datatype]
    values = struct.unpack_from(f"<{count}{code}", tensor.data)
    if tensor.datatype in ("FP32", "FP64"):
        return ",".join(format(value, "g") for value in values)
    return ",".join(str(int(value)) for value in values)


LOG = logging.getLogger("conch")


def trace_text(trace: Trace) -> str:
    """Format the objects of a trace, without brackets: the client's request first, then its child requests."""
    return ",".join(
        json.dumps(document, separators=(",", ":")) for request in trace.requests for document in _objects(request)
    )


def _objects(request: TracedRequest) -> Iterator[dict[str, Any]]:
    """Yield the objects of one request: its identity (before ``REQUEST_START``), its events, and its tensors."""
    trace = request.trace
    after = "QUEUE_START" if any(event.name == "QUEUE_START" for event in request.events) else "REQUEST_START"
    for event in request.events if trace.timestamps else ():
        if event.name == "REQUEST_START":
            yield _header(request)
        yield {"id": request.id, "timestamps": [{"name": event.name, "ns": event.ns}]}
        if event.name == after:
            yield from _tensors(request)
    if not trace.timestamps:
        yield from _tensors(request)


def _header(request: TracedRequest) -> dict[str, Any]:
    header: dict[str, Any] = {
        "id": request.id,
        "model_name": request.model_name,
        "model_version": request.model_version,
    }
    if request.request_id:
        header["request_id"] = request.request_id
    if request.parent is not None:
        header["parent_id"] = request.parent.id
    return header


def _tensors(request: TracedRequest) -> Iterator[dict[str, Any]]:
    for activity, tensor in request.tensors:
        shown = {
            "name": tensor.name,
            "data": data_text(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype,
        }
        yield {"id": request.id, "activity": activity, "tensor": shown}


class TraceFile:
    """The file ``name``, truncated by the first write, and the numbered files beside it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbered = 0
        self._file: IO[str] | None = None
        self._writer = LastingExecutor(1, "conch-traces")

    def append(self, traces: Sequence[Trace]) -> None:
        """Append traces to the file."""
        self._write(self._append, traces)

    def write_numbered(self, traces: Sequence[Trace]) -> None:
        """Write traces to a separate file, the next of ``<name>.0``, ``<name>.1`` …"""
        number, self._numbered = self._numbered, self._numbered + 1
        self._write(lambda text: _write_whole(Path(f"{self.name}.{number}"), f"[{text}]"), traces)

    def close(self) -> None:
        """Finish the file after all pending writes."""
        self._writer.submit(self._end)
        self._writer.shutdown()

    def _write(self, write: Callable[[str], None], traces: Sequence[Trace]) -> None:
        self._writer.submit(_logged, lambda: write(",".join(map(trace_text, traces))))

    def _append(self, text: str) -> None:
        if self._file is None:
            self._file = Path(self.name).open("w", encoding="utf-8")  # noqa: SIM115 (until the server stops)
            self._file.write("[")
        else:
            self._file.write(",")
        self._file.write(text)
        self._file.flush()

    def _end(self) -> None:
        if self._file is not None:
            self._file.write("]")
            self._file.close()
            self._file = None


def _write_whole(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _logged(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        LOG.error("failed creating trace file: %s", error)
