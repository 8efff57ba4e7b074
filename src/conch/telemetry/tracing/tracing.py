"""Trace settings, global and per model, the selection of requests to trace, and trace files.

The application makes one ``Tracing`` from the options. Front ends first check ``on``, the only cost of disabled
tracing, and begin traces with :meth:`Tracing.begin`. Clients read and change the settings.

Files have Triton's format: arrays of JSON objects, each about one request. Settings with the same file name share a
``TraceFile``. A single thread writes the traces in order, never the event loop.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from conch.core.errors import ConchError
from conch.core.inference import InferRequest
from conch.core.tensors import ELEMENT_SIZE, NATIVE_FORMAT, WireTensor, split_bytes
from conch.machine.extras import require
from conch.machine.threads import LastingExecutor
from conch.telemetry.tracing.trace import FrontendMoments, Trace, TracedRequest, caller_of
from conch.telemetry.tracing.values import OwnValues, TraceChanges, TraceValues

if TYPE_CHECKING:
    from conch.telemetry.tracing.collector import Collector


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
        path = Path(f"{self.name}.{number}")
        self._write(lambda text: path.write_text(f"[{text}]", encoding="utf-8"), traces)

    def close(self) -> None:
        """Finish the file after all pending writes."""
        self._writer.submit(self._end)
        self._writer.shutdown()

    def _write(self, write: Callable[[str], object], traces: Sequence[Trace]) -> None:
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


def _logged(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        LOG.error("failed creating trace file: %s", error)


class TraceSink(Protocol):
    """A destination of finished traces: a file, or a collector."""

    def append(self, traces: Sequence[Trace]) -> None: ...

    def write_numbered(self, traces: Sequence[Trace]) -> None: ...

    def close(self) -> None: ...


class Sampling:
    """Counts requests and traces of one setting until the setting is changed.

    Traces that began under a setting also end under it: after :meth:`retire`, kept traces are written as soon as the
    last of them has ended.
    """

    def __init__(self, values: TraceValues, sink: TraceSink) -> None:
        self.values = values
        self._sink = sink
        self._possible = not values.problem
        self._left = values.count
        self._seen = 0
        self._collected = 0
        self._open = 0
        self._kept: list[Trace] = []
        self._retired = False

    @property
    def active(self) -> bool:
        """Whether any request may be traced."""
        return self._possible and self._left != 0

    @property
    def shown(self) -> TraceValues:
        """The values with the remaining number of traces."""
        return replace(self.values, count=self._left)

    def takes(self, forced: bool) -> bool:
        """Return whether to trace the next request: every ``rate``-th, and each that its caller traces (``forced``)."""
        if not self.active:
            return False
        self._seen += 1
        if self._seen % self.values.rate and not forced:
            return False
        if self._left > 0:
            self._left -= 1
        self._open += 1
        return True

    def ended(self, trace: Trace) -> None:
        """Keep a finished trace and write kept ones: ``log_frequency`` per numbered file, or all after the last."""
        self._open -= 1
        self._kept.append(trace)
        self._collected += 1
        frequency = self.values.log_frequency
        if self.values.mode == "opentelemetry":
            self._write(self._sink.append)
        elif (not self._left and self._collected == self._seen) or (frequency and len(self._kept) >= frequency):
            self._write(self._sink.write_numbered)
        self._write_if_ended()

    def retire(self) -> None:
        """Mark this setting as replaced: write kept traces once no traced request is in flight."""
        self._retired = True
        self._write_if_ended()

    def _write_if_ended(self) -> None:
        if self._retired and not self._open and self._kept:
            self._write(self._sink.write_numbered if self.values.log_frequency else self._sink.append)

    def _write(self, write: Callable[[Sequence[Trace]], None]) -> None:
        kept, self._kept = self._kept, []
        write(kept)


class Tracing:
    """The trace settings of a server. ``sink`` receives the traces; the default comes from ``startup``.

    Raises UNSUPPORTED if a collector is configured and OpenTelemetry is not installed.
    """

    def __init__(self, startup: TraceValues, sink: TraceSink | None = None) -> None:
        self._startup = startup
        self._collector: Collector | None = _collector(startup)
        self._sink: TraceSink = sink or self._collector or TraceFile(startup.file)
        self._own = OwnValues()
        self._own_of_models: dict[str, OwnValues] = {}
        self._global = Sampling(startup, self._sink)
        self._of_models: dict[str, Sampling] = {}
        #: Whether any request may be traced.
        self.on = self._global.active

    def begin(
        self, request: InferRequest, frontend: FrontendMoments, began: int, headers: Mapping[str, str] | None = None
    ) -> None:
        """Begin a trace of a request before it is passed to its model, if sampling selects it.

        ``began`` is when the request began to arrive; ``headers`` contains ``traceparent`` and ``tracestate``, if sent.
        """
        sampling = self._of_models.get(request.model_name, self._global)
        caller = caller_of(headers) if self._collector is not None and headers else None
        if not sampling.takes(forced=caller is not None):
            return
        collector = self._collector
        trace = Trace(
            sampling.values.level,
            sampling.ended,
            collector.new_context(caller) if collector is not None else None,
        )
        request.trace = traced = TracedRequest(trace, frontend=frontend)
        traced.begin()
        for name, ns in zip(frontend.received, (began, request.times.arrived), strict=True):
            traced.mark(name, ns)

    def shown(self, model: str = "") -> dict[str, Any]:
        """Return the setting of a model, or with an empty name the global one, as clients see it."""
        return self._of_models.get(model, self._global).shown.shown()

    def update(self, model: str, changes: TraceChanges) -> None:
        """Change the setting of a model, or with an empty name the global one and models' fields that fall back to it.

        A field that is None is cleared. Raises INVALID_ARG, and changes nothing, for values that enable tracing but
        cannot trace.
        """
        if model:
            own = self._own_of_models.get(model, OwnValues()).changed(changes)
            self._set_model(model, own, own.over(self._global.shown))
        else:
            own = self._own.changed(changes)
            values = own.over(self._startup)
            of_models = {name: theirs.over(values) for name, theirs in self._own_of_models.items()}
            self._own = own
            self._global.retire()
            self._global = Sampling(values, self._sink)
            for name, theirs in of_models.items():
                self._set_model(name, self._own_of_models[name], theirs)
        self.on = any(tracer.active for tracer in (self._global, *self._of_models.values()))

    def close(self) -> None:
        """Write kept traces and finish the files. Call when no request is in flight, not on the event loop."""
        for sampling in (self._global, *self._of_models.values()):
            sampling.retire()
        self._sink.close()

    def _set_model(self, model: str, own: OwnValues, values: TraceValues) -> None:
        current = self._of_models.pop(model, None)
        if current is not None:
            current.retire()
        self._own_of_models.pop(model, None)
        if not own.empty:
            self._own_of_models[model] = own
            self._of_models[model] = Sampling(values, self._sink)


def _collector(values: TraceValues) -> Collector | None:
    """Return the collector in the options; None if traces are written to files."""
    if values.mode != "opentelemetry":
        return None
    require("--trace-config mode=opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    from conch.telemetry.tracing.collector import Collector

    return Collector(values)
