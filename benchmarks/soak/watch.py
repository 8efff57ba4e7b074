"""What the server keeps while the soak runs: its memory, descriptors and workers, every second."""

from __future__ import annotations

import threading
from statistics import median
from typing import Final, NamedTuple

import psutil

from tests.e2e.processes import workers
from tests.servers import ConchServer

_PERIOD: Final = 1.0
_MEBIBYTE: Final = 1 << 20


class Sample(NamedTuple):
    """The server's resident memory (MiB), open descriptors and number of workers."""

    memory: float
    descriptors: int
    workers: int


class Watch:
    """Takes samples in a thread until :meth:`stop`."""

    def __init__(self, server: ConchServer) -> None:
        assert server.process is not None
        self.samples: list[Sample] = []
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def growth(self) -> float:
        """By how much (MiB) the median memory of the last fifth exceeds that of the second fifth."""
        size = max(1, len(self.samples) // 5)
        early, late = self.samples[size : 2 * size], self.samples[-size:]
        if not early:
            return 0.0
        return median(sample.memory for sample in late) - median(sample.memory for sample in early)

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            memory = self._process.memory_info().rss / _MEBIBYTE
            self.samples.append(Sample(memory, self._process.num_fds(), len(workers(self._server))))
