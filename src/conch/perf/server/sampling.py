"""Looks at something at a steady pace while requests are sent, in a thread of the process that measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from time import monotonic_ns
from typing import Generic, TypeVar

from conch.perf.senders.records import Span

Sample = TypeVar("Sample")


class Sampler(Generic[Sample]):
    """Calls ``read`` every ``interval`` seconds while it is entered, and keeps what it returns."""

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
        """The samples of ``spans``; all there are, if these were too short for one."""
        found = [sample for moment, sample in self._samples if any(start < moment <= end for start, end in spans)]
        return found or [sample for _, sample in self._samples]

    def _run(self) -> None:
        while True:
            sample = self._read()
            self._samples.append((monotonic_ns(), sample))
            if self._ended.wait(self._interval):
                return
