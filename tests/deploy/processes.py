"""Containers as processes: ``conch serve`` with a manifest's arguments, over folders and ports of the test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.oracle.run import free_ports, wait_until_ready
from tests.servers import CONCH

#: What the image's entry point adds, but for the address.
LOCAL = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1")


class ContainerProcess:
    """The process of a container, as a context manager; ``places`` says which folders stand for which of its own.

    ``http`` and ``metrics`` are the addresses of the ports that ``arguments`` give.
    """

    def __init__(self, arguments: Sequence[str], places: Mapping[str, Path], log: Path) -> None:
        ports = {name: str(port) for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)}
        given: list[str] = []
        for argument in arguments:
            flag, _, value = argument.partition("=")
            for inside, outside in places.items():
                argument = argument.replace(inside, str(outside))
            name = flag.removeprefix("--").removesuffix("-port")
            given.append(f"{flag}={ports[name]}" if flag.endswith("-port") and value else argument)
        self.command = [str(CONCH), "serve", *LOCAL, *given]
        self.http, self.metrics = (f"127.0.0.1:{ports[name]}" for name in ("http", "metrics"))
        self._log = log

    def __enter__(self) -> ContainerProcess:
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(self.http, self.process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
