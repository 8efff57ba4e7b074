"""The operating-system process of a worker: started with one end of a socket, killed, and watched until its end.

Used by ``WorkerProcess``, on the event loop and in the main thread, whose end no worker survives.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from conch.workers.child import worker as program


class ChildProcess(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_status(self) -> int | None:
        """The status of a process that has ended, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """End the process now, if it has not ended; its end is told as any other."""


#: Starts the program of a worker under an interpreter with an environment; returns the process and the server's end of
#: the channel.  The function is called once, when the process has ended.
Spawn = Callable[[str, Mapping[str, str], Callable[[], None]], tuple[ChildProcess, socket.socket]]


class SpawnedProcess:
    """A child of this process.

    A process that the model forked may hold the channel open, so only the pid tells the end for certain: on Linux a
    pidfd reports it, elsewhere the end is noticed when the process is killed because its channel has closed.
    """

    def __init__(self, popen: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
        self._popen = popen
        self._on_exit = on_exit
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(popen.pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        return self._popen.returncode

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        if self._pidfd < 0:
            self._exited()

    def _exited(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._popen.wait()
        self._on_exit()


def spawn(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a worker.  Raises OSError when the process or a descriptor for it cannot be had."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            popen = subprocess.Popen(
                [python, str(Path(program.__file__)), str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        try:
            return SpawnedProcess(popen, on_exit), ours
        except OSError:
            popen.kill()
            popen.wait()
            raise
    except OSError:
        ours.close()
        raise
