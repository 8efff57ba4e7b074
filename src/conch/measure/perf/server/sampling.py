"""Samples a value at a constant interval during a measurement, in a thread of the measuring process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from time import monotonic_ns
from typing import Generic, TypeVar

from conch.measure.perf.senders.records import Span

Sample = TypeVar("Sample")


class Sampler(Generic[Sample]):
    """Calls ``read`` every ``interval`` seconds while the context is entered, and keeps the results."""

    def __init__(self, read: Callable[[], Sample], interval: float) -> None:
        self._read = read
        self._interval = interval
        self._samples: list[tuple[int, Sample]] = []
        self._ended = Event()
        self._thread = Thread(target=self._run, name="conch perf samples", daemon=True)

    def __enter__(self) -> Sampler[Sample]:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def within(self, spans: Sequence[Span]) -> list[Sample]:
        """Return the samples in ``spans``, or all samples if there are none."""
        inside = [sample for moment, sample in self._samples if any(start < moment <= end for start, end in spans)]
        return inside or [sample for _, sample in self._samples]

    def _run(self) -> None:
        while True:
            sample = self._read()
            self._samples.append((monotonic_ns(), sample))
            if self._ended.wait(self._interval):
                return
