"""Starts worker processes with one end of a socket, logs their output, kills them, and reports their end.

Used by ``WorkerProcess``, on the event loop in the main thread: workers are killed when the thread that started them
ends. Output is read line by line; a model that writes faster than lines can be logged blocks, as with a slow terminal.

Also raises the limit of open files for the server, which has many connections, and restores it for workers: models may
use ``select``, which fails for descriptors of 1024 or more.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from conch.core.inference import ignore
from conch.core.variables import API_KEY
from conch.workers.child import worker as program

#: More than any server needs. It replaces "unlimited", because some programs loop over all possible descriptors.
_MOST: Final = 1 << 20

_before: tuple[int, int] | None = None


def raise_limit() -> tuple[int, int]:
    """Raise the soft limit to the hard limit; return the old and new soft limit. Called once, at startup."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= now:
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
    _before = soft, hard
    return soft, now


def restore_limit(pid: int) -> None:
    """Restore the original limit for a process that this one has just started."""
    if _before is not None and hasattr(resource, "prlimit"):
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
        except OSError:  # the process has ended
            pass


#: Bytes per read; an unfinished line that exceeds this is passed on as it is.
_READ: Final = 64 << 10
#: Default maximum size of a pipe (bytes); limits the output that is read after the worker has ended.
_MAX_REST: Final = 1 << 20


class WorkerOutput:
    """The reading end of a pipe; ``on_line`` is called with every line, without its line end.

    If a line is overwritten with carriage returns, as by progress bars, only its last state is passed on.
    """

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        self._fd = fd
        self._on_line = on_line
        self._unfinished = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """Pass on the remaining output and stop reading, because the worker has ended."""
        if self._fd < 0:
            return
        left = _MAX_REST
        while left > 0 and self._fd >= 0:
            count = self._read()
            if not count:
                break
            left -= count
        self._end()

    def _read(self) -> int:
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return 0
        if not data:  # all writers have closed the pipe
            self._end()
            return 0
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._unfinished) > _READ:
            self._pass_on(self._unfinished)
            self._unfinished = b""
        return len(data)

    def _end(self) -> None:
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._unfinished:
            self._pass_on(self._unfinished)

    def _pass_on(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        if text.strip():
            self._on_line(text.decode("utf-8", "replace"))


class ChildProcess(Protocol):
    """A child process that has been started."""

    @property
    def pid(self) -> int: ...

    @property
    def exit_status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""

    def kill(self) -> None:
        """Kill the process if it has not ended; ``on_exit`` is called as for any other end."""


#: Starts a worker: takes the interpreter, the environment, ``on_exit`` (called once, when the process has ended) and
#: ``on_line`` (called with each line of output). Returns the process and the server's end of the channel.
Spawn = Callable[
    [str, Mapping[str, str], Callable[[], None], Callable[[str], None]], tuple[ChildProcess, socket.socket]
]


class SpawnedProcess:
    """A child process; ``wait`` waits for its end and returns its status, negative for a signal.

    The end of the channel does not show the end of the process, because a process that the model forked may hold the
    channel open. On Linux a pidfd reports the end; on other systems it is reported when the process is killed after its
    channel has closed. Raises OSError if no pidfd can be opened.
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
        # Without a pidfd, the id may belong to another process if other code in this program has waited for this one.
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
        # Processes that the model started are in the worker's process group, unless they left it. The group id cannot
        # be reused before the worker has been waited for.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exit_status = self._wait()
        if self._output is not None:
            self._output.close()
            self._output = None
        on_exit, self._on_exit = self._on_exit, ignore  # called once; releases the reference
        on_exit()


def spawn(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a worker. Raises OSError if the process cannot be started or no descriptor is left."""
    return _spawn_logged(python, environment, on_exit, on_line, socket.SOCK_STREAM)


def spawn_template(
    python: str, environment: Mapping[str, str], on_exit: Callable[[], None], on_line: Callable[[str], None]
) -> tuple[ChildProcess, socket.socket]:
    """Start a worker template (``workers/child/template.py``); like ``spawn``, but returns its control socket."""
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
    """Start a worker that inherits the standard streams, so that its model can be debugged; else like ``spawn``."""
    restore = _terminal_restorer()

    def exited() -> None:
        restore()
        on_exit()

    atexit.register(restore)  # if this process ends first, the worker is killed, perhaps at a prompt
    popen, ours = _start(python, environment, program.AT_TERMINAL)
    return _watched(popen, ours, None, exited)


def _terminal_restorer() -> Callable[[], None]:
    """Return a function that restores the current terminal settings, for a debugger that is killed at its prompt."""
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
    """Start the worker program; ``streams`` are standard input, output and error, None to inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    stdin, stdout, stderr = streams
    try:
        with theirs:
            fd = theirs.fileno()
            command = [python, str(Path(program.__file__)), str(fd), *arguments]
            variables = {name: value for name, value in environment.items() if name != API_KEY}
            popen = subprocess.Popen(command, env=variables, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=(fd,))
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
