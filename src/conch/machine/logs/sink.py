"""Writes log lines without ever blocking on the reader.

If a pipe, a terminal or a socket is full, lines are buffered up to a limit, and a thread writes them when there is
room again. Lines beyond the limit, or for a full disk, are counted, and the log reports how many were lost. While
there is room, the thread that logs a line also writes it, so that nothing is lost if the process dies.
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

#: Limits of the lines buffered for a slow reader (lines, bytes).
MOST_LINES: Final = 10_000
MOST_BYTES: Final = 4 << 20
#: Interval between checks for room if no event reports it (s).
_PERIOD: Final = 1.0


class Target(Protocol):
    """A destination of log lines."""

    def write(self, data: bytes) -> int:
        """Write at least a part of ``data``; returns the number of bytes written.

        Raises BlockingIOError if there is no room now, and OSError for a permanent failure.
        """

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until there is room."""

    def close(self) -> None: ...


class Sink:
    """Buffers the lines for one target. Thread-safe; ``notice`` makes the line that reports lost lines."""

    def __init__(self, target: Target, notice: Callable[[int], bytes]) -> None:
        self._target = target
        self._notice = notice
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        #: Whether the last write ended within a line.
        self._broken = False
        self._writer: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Write a line; buffer it if there is no room, and count it as lost if the buffer is full."""
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
        """Wait up to ``seconds`` for the reader to take buffered lines."""
        until = monotonic() + seconds
        while self._waiting and (left := until - monotonic()) > 0:
            self._target.wait(left)
            with self._lock:
                self._drain()

    def close(self) -> None:
        """Discard buffered lines, and close the target."""
        with self._lock:
            self._waiting.clear()
            self._lost = 0  # the writer writes nothing more: the descriptor may be another file's by then
            self._target.close()

    def _start_writer(self) -> None:
        writer = threading.Thread(target=self._write_later, name="log", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # the process is exiting, or has no more threads: the next line tries again
            return
        self._writer = writer

    def _keep(self, line: bytes) -> None:
        if len(self._waiting) < MOST_LINES and self._bytes + len(line) <= MOST_BYTES and self._waiting:
            self._waiting.append(line)
            self._bytes += len(line)
        else:
            self._lost += 1

    def _drain(self) -> bool:
        """Write buffered lines, then the notice of lost ones; returns whether everything was written."""
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
            # A full disk or a closed reader: waiting would not help.
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
    """Return a target for a text stream that never blocks: its descriptor, if it has one."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):
        return _Stream(stream)
    if stat.S_ISSOCK(mode):
        return _Socket(descriptor)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        try:
            # Non-blocking mode belongs to the open file, which other processes share, so it is opened again.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return _Descriptor(os.open(f"/proc/self/fd/{descriptor}", flags), own=True)
        except OSError:
            pass  # the file belongs to another user
    return _Descriptor(descriptor, own=False)


def open_log_file(path: str) -> int:
    """Return a descriptor that appends to a file, which may be a pipe without a reader. Raises OSError."""
    flags = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_WRONLY, 0o666)
    except OSError:
        # Opening a pipe only for writing fails without a reader.
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
            # A pipe with room accepts this much without blocking.
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
    """Writes directly to a stream of the application, such as a notebook's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode("utf-8"))
        self._stream.flush()
        return len(data)

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


def _has_room(descriptor: int, seconds: float) -> bool:
    """Wait until the descriptor is writable; ``select`` is limited to descriptors below 1024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(int(seconds * 1000)))
