"""Writes the lines of the log without ever waiting for whoever reads them.

Lines for a pipe, a terminal or a socket that takes no more are kept, up to a limit, and written by a thread when there
is room again; those beyond the limit, and those for a full disk, are counted, and the log says how many were lost.  As
long as there is room a line is written by the thread that logs it, so that nothing is lost when the process dies.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol

#: What is kept for a reader that has stopped reading.
MOST_LINES: Final = 10_000
MOST_BYTES: Final = 4 << 20
#: How often a reader is looked for that no event tells of (s).
_PERIOD: Final = 1.0


class Target(Protocol):
    """Where lines are written to."""

    def write(self, data: bytes) -> int:
        """Write some of ``data``; returns how much.

        Raises BlockingIOError where there is no room now, and OSError where there will be none.
        """

    def wait(self, seconds: float) -> None:
        """Return when there is room, or after so many seconds."""

    def close(self) -> None: ...


class Sink:
    """The lines for one target.  Any thread may call; ``notice`` makes the line that says how many were lost."""

    def __init__(self, target: Target, notice: Callable[[int], bytes]) -> None:
        self._target = target
        self._notice = notice
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        #: Whether the last bytes that were written are a part of a line whose rest was lost.
        self._broken = False
        self._writer: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Write a line, or keep it, or count it as lost."""
        with self._lock:
            if (self._waiting or self._lost) and not self._drain():
                self._keep(line)
            else:
                self._waiting.append(line)
                self._bytes += len(line)
                self._drain()
            if self._waiting and self._writer is None:
                self._start_writer()

    def flush(self, seconds: float) -> None:
        """Give a reader that many seconds to take what is kept."""
        until = monotonic() + seconds
        while self._waiting and (left := until - monotonic()) > 0:
            self._target.wait(left)
            with self._lock:
                self._drain()

    def close(self) -> None:
        """Forget what is kept, and close what was opened to write."""
        with self._lock:
            self._waiting.clear()
            self._lost = 0  # the writer writes nothing more: the descriptor may be another file's by then
            self._target.close()

    def _start_writer(self) -> None:
        writer = threading.Thread(target=self._write_later, name="log", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # the process ends, or has no more threads: the next line tries again
            return
        self._writer = writer

    def _keep(self, line: bytes) -> None:
        if len(self._waiting) < MOST_LINES and self._bytes + len(line) <= MOST_BYTES and self._waiting:
            self._waiting.append(line)
            self._bytes += len(line)
        else:
            self._lost += 1

    def _drain(self) -> bool:
        """Write what is kept and how much was lost; whether all of that was done."""
        try:
            while self._waiting:
                line = self._waiting[0]
                written = self._target.write(line)
                self._bytes -= written
                if written == len(line):
                    self._waiting.popleft()
                    self._broken = False
                else:
                    self._waiting[0] = line[written:]
                    self._broken = self._broken or written > 0
            if self._lost:
                line = (b"\n" if self._broken else b"") + self._notice(self._lost)
                written = self._target.write(line)
                self._lost, self._broken = 0, False
                if written < len(line):
                    self._waiting.append(line[written:])
                    self._bytes += len(line) - written
                    return self._drain()
        except BlockingIOError:
            return False
        except OSError:
            # A full disk, a reader that is gone: nothing that waiting for would help against.
            self._lost += len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return False
        return True

    def _write_later(self) -> None:
        while True:
            self._target.wait(_PERIOD)
            with self._lock:
                if self._drain() or not self._waiting:
                    self._writer = None
                    return


def target_of(stream: Any) -> Target:
    """How to write to a text stream without waiting: by its descriptor where it has one."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):
        return _Stream(stream)
    if stat.S_ISSOCK(mode):
        return _Socket(descriptor)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        try:
            # Not to wait is a property of what was opened, which other processes share: so it is opened once more.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return _Descriptor(os.open(f"/proc/self/fd/{descriptor}", flags), own=True)
        except OSError:
            pass  # somebody else's
    return _Descriptor(descriptor, own=False)


def open_log_file(path: str) -> int:
    """A descriptor that appends to a file, which may be a pipe that nobody reads yet.  Raises OSError."""
    flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_WRONLY, 0o666)
    except OSError:
        # To write alone, a pipe can only be opened when somebody reads it.
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            raise
        return os.open(path, flags | os.O_RDWR)


class _Descriptor:
    def __init__(self, descriptor: int, *, own: bool) -> None:
        self._descriptor = descriptor
        self._own = own
        mode = os.fstat(descriptor).st_mode
        self._may_wait = not own and not stat.S_ISREG(mode) and os.get_blocking(descriptor)

    def write(self, data: bytes) -> int:
        if self._may_wait:
            # With room, a pipe takes this much at once.
            if not self._has_room(0):
                raise BlockingIOError
            data = data[: select.PIPE_BUF]
        return os.write(self._descriptor, data)

    def wait(self, seconds: float) -> None:
        self._has_room(seconds)

    def _has_room(self, seconds: float) -> bool:
        return _has_room(self._descriptor, seconds)

    def close(self) -> None:
        if self._own:
            os.close(self._descriptor)
            self._own = False


class _Socket:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def write(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def wait(self, seconds: float) -> None:
        _has_room(self._socket.fileno(), seconds)

    def close(self) -> None:
        self._socket.close()


class _Stream:
    """A stream of the program's own, such as a notebook's, which is written to as it is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode("utf-8"))
        self._stream.flush()
        return len(data)

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


def _has_room(descriptor: int, seconds: float) -> bool:
    """Wait until something can be written; ``select`` would take no descriptor beyond 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(int(seconds * 1000)))
