"""The operating-system process of a worker: started with one end of a socket, killed, and watched until its end.

Used by ``WorkerProcess``, on the event loop and in the main thread, whose end no worker survives.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from conch.workers.child import worker as program
from conch.workers.host.descriptors import restore_limit
from conch.workers.host.output import WorkerOutput


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
#: the channel.  Of the functions, one is called once, when the process has ended, one with each line that it prints.
Spawn = Callable[
    [str, Mapping[str, str], Callable[[], None], Callable[[str], None]], tuple[ChildProcess, socket.socket]
]


class SpawnedProcess:
    """A child of this process; ``wait`` returns its status once it has ended, negative for a signal.

    A process that the model forked may hold the channel open, so only the pid tells the end for certain: on Linux a
    pidfd reports it, elsewhere the end is noticed when the process is killed because its channel has closed.  Raises
    OSError without a descriptor.
    """

    def __init__(
        self, pid: int, wait: Callable[[], int], output: WorkerOutput | None, on_exit: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.exit_status: int | None = None
        self._wait = wait
        self._output = output
        self._on_exit = on_exit
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def kill(self) -> None:
        if self.exit_status is not None:
            return
        # The id is its own as long as it has not been waited for, which another part of this program may have done.
        with suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        if self._pidfd < 0:
            self._exited()

    def _exited(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        # What the model started is in the worker's process group, unless it was told to leave it.  Until the worker
        # has been waited for, no other group can have its number.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exit_status = self._wait()
        if self._output is not None:
            self._output.close()
            self._output = None
        on_exit, self._on_exit = self._on_exit, _ignore  # told once, it need not be held any more
        on_exit()


def _ignore() -> None:
    """Take the place of what has been told of the end of a process."""


def spawn(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a worker.  Raises OSError when the process or a descriptor for it cannot be had."""
    return _spawn_logged(python, environment, on_exit, on_line, socket.SOCK_STREAM)


def spawn_template(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a template (``workers/child/template.py``); the socket is its control socket.  Otherwise as ``spawn``."""
    return _spawn_logged(python, environment, on_exit, on_line, socket.SOCK_SEQPACKET, program.TEMPLATE)


def _spawn_logged(
    python: str,
    environment: Mapping[str, str],
    on_exit: Callable[[], None],
    on_line: Callable[[str], None],
    kind: socket.SocketKind,
    *arguments: str,
) -> tuple[ChildProcess, socket.socket]:
    readable, writable = os.pipe()
    output: WorkerOutput | None = None
    try:
        streams = (subprocess.DEVNULL, writable, writable)
        popen, ours = _start(python, environment, *arguments, kind=kind, streams=streams)
        output = WorkerOutput(readable, on_line)
    finally:
        os.close(writable)
        if output is None:
            os.close(readable)
    return _watched(popen, ours, output, on_exit)


def spawn_at_terminal(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a worker that has this process's standard streams, so that its model can be debugged; as ``spawn``."""
    restore = _terminal_restorer()

    def exited() -> None:
        restore()
        on_exit()

    atexit.register(restore)  # this process may end before the worker does, which then is killed
    popen, ours = _start(python, environment, program.AT_TERMINAL)
    return _watched(popen, ours, None, exited)


def _terminal_restorer() -> Callable[[], None]:
    """A function that gives the terminal its present settings again, which a debugger killed at its prompt does not."""
    if not os.isatty(0):
        return lambda: None
    import termios

    return partial(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0))


def _start(
    python: str,
    environment: Mapping[str, str],
    *arguments: str,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    streams: tuple[int | None, int | None, int | None] = (None, None, None),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The program with ``arguments``; standard input, output and error are this process's where there is None."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    stdin, stdout, stderr = streams
    try:
        with theirs:
            fd = theirs.fileno()
            command = [python, str(Path(program.__file__)), str(fd), *arguments]
            popen = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=(fd,)
            )
        restore_limit(popen.pid)
        return popen, ours
    except OSError:
        ours.close()
        raise


def _watched(
    popen: subprocess.Popen[bytes], ours: socket.socket, output: WorkerOutput | None, on_exit: Callable[[], None]
) -> tuple[ChildProcess, socket.socket]:
    try:
        return SpawnedProcess(popen.pid, popen.wait, output, on_exit), ours
    except OSError:
        popen.kill()
        popen.wait()
        ours.close()
        if output is not None:
            output.close()
        raise
