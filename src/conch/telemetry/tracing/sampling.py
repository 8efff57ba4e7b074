"""One setting in use: which requests it traces, and what becomes of their traces; it runs no I/O itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from conch.telemetry.tracing.trace import Trace
from conch.telemetry.tracing.values import TraceValues


class TraceSink(Protocol):
    """What takes traces that have ended: a file, or a collector."""

    def append(self, traces: Sequence[Trace]) -> None: ...

    def write_numbered(self, traces: Sequence[Trace]) -> None: ...

    def close(self) -> None: ...


class Sampling:
    """Counts requests and traces for one setting, from the change that made it to the next.

    Traces that were begun with it end with it: when it is :meth:`retired`, what it has kept is written as soon as the
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
        """Whether requests may be traced."""
        return self._possible and self._left != 0

    @property
    def shown(self) -> TraceValues:
        """The values with as many traces as are left."""
        return replace(self.values, count=self._left)

    def takes(self, forced: bool) -> bool:
        """Whether the next request is traced: each ``rate``-th, or one that its client wants to be."""
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
        """Keep a trace, or write what is kept: in numbered files of ``log_frequency`` traces, or when all are there."""
        self._open -= 1
        self._kept.append(trace)
        self._collected += 1
        frequency = self.values.log_frequency
        if self.values.mode == "opentelemetry":
            self._write(self._sink.append)
        elif (not self._left and self._collected == self._seen) or (frequency and len(self._kept) >= frequency):
            self._write(self._sink.write_numbered)
        self._end_if_over()

    def retire(self) -> None:
        """Another setting takes its place: write what is kept, once nothing is under way."""
        self._retired = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._retired and not self._open and self._kept:
            self._write(self._sink.write_numbered if self.values.log_frequency else self._sink.append)

    def _write(self, write: Callable[[Sequence[Trace]], None]) -> None:
        kept, self._kept = self._kept, []
        write(kept)
