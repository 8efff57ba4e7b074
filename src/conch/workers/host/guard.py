"""A process that outlives the server by a moment, to end what its models have started (``workers/child/guard.py``).

Belongs to ``WorkerProcesses``; on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from conch.workers.child import guard as program
from conch.workers.host.spawn import ChildProcess, Spawn

LOG = logging.getLogger("conch")

#: How long the process may take to end (s).
_END_SECONDS: Final = 5.0


class Guard:
    """Knows the workers that run; its process is started with the first, and again when somebody has ended it."""

    def __init__(self) -> None:
        self._workers: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watched(self, spawn: Spawn) -> Spawn:
        """``spawn``, for workers that the guard knows as long as they run."""

        def start(
            python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
        ) -> tuple[ChildProcess, socket.socket]:
            def exited() -> None:
                self.forget(process.pid)
                on_exit()

            process, connection = spawn(python, environment, exited, on_line)
            self.watch(process.pid)
            return process, connection

        return start

    def watch(self, pid: int) -> None:
        """A worker has started, which leads a process group."""
        self._workers.add(pid)
        if self._process is None or not self._tell(f"+{pid}\n"):
            self._start()

    def forget(self, pid: int) -> None:
        """A worker and its group have ended."""
        self._workers.discard(pid)
        self._tell(f"-{pid}\n")

    async def close(self) -> None:
        """End the process; whatever still runs is killed."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(b".\n")  # processes that this one has forked may keep the pipe open
            process.stdin.close()
            await asyncio.to_thread(_end, process)

    def _start(self) -> None:
        if sys.platform != "linux":
            return
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        try:
            # In a session of its own: neither Ctrl+C nor the end of the terminal reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(program.__file__))],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            LOG.warning("what models start would outlive a server that is killed: %s", error)
            self._process = None
            return
        self._tell("".join(f"+{pid}\n" for pid in self._workers))

    def _tell(self, lines: str) -> bool:
        """Send what has changed; False if nobody reads it."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(lines.encode())
        except OSError:
            return False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process, but not for one that somebody has stopped."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
