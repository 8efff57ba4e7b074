"""The servers of the comparison that are neither plain conch nor Triton, started as the others are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.oracle.run import free_ports, wait_until_ready
from tests.servers import ConchServer

ROOT: Final = Path(__file__).resolve().parents[2]


class PaddingServer(ConchServer):
    """conch with every batch in arrival order and padded to its longest text (:mod:`benchmarks.peers.padding`)."""

    def __init__(self, repository: Path, *flags: str, log: Path | None = None) -> None:
        # Workers find ``benchmarks`` by it.
        super().__init__(repository, *flags, log=log, env={"PYTHONPATH": str(ROOT)})
        self.command = [sys.executable, "-m", "benchmarks.peers.padding", *self.command[1:]]


class WebServer:
    """``peers/web.py`` under uvicorn, with one process, as a context manager; ``http`` is its address."""

    def __init__(self, python: Path, checkpoint: Path, graph: Path) -> None:
        (port,) = free_ports(1)
        self.http = f"127.0.0.1:{port}"
        self.command = [str(python), str(Path(__file__).with_name("web.py")), str(port), str(checkpoint), str(graph)]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> WebServer:
        self.process = subprocess.Popen(self.command, env={**os.environ, "PYTHONNOUSERSITE": "1"})
        try:
            wait_until_ready(self.http, self.process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
