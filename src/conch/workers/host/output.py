"""Reads the standard output and error of a worker and its child processes, line by line.

Owned by a ``SpawnedProcess``; runs on the server's event loop. A model that writes faster than lines can be logged
blocks, as with a slow terminal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

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
