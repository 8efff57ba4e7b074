"""A program at a terminal of its own, whose screen a test reads and whose keyboard it types on."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType

#: How long something may take to appear (s).
TIMEOUT = 60


def hear_ctrl_c() -> None:
    """Undo in a new process that SIGINT is ignored, as it is where a shell runs the tests in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """Runs ``command`` as the foreground process of a pseudo-terminal, as a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._unread = ""
        #: All that has appeared so far.
        self.screen = ""

    def __enter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            self._command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._slave = slave  # kept open, so that its settings can be read when the process has ended
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, pattern: str) -> re.Match[str]:
        """Wait until ``pattern`` appears in what has not been read yet; the rest is left for the next call."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            found = re.search(pattern, self._unread)
            if found is not None:
                self._unread = self._unread[found.end() :]
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not appear:\n{self.screen}"
            if select.select([self._master], [], [], left)[0]:
                text = os.read(self._master, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
                self._unread += text
                self.screen += text

    @property
    def echoes(self) -> bool:
        """Whether what is typed is shown, as a shell expects to find its terminal."""
        return bool(termios.tcgetattr(self._slave)[3] & termios.ECHO)
