"""A process of ``conch serve`` that ends with the process that started it.

The server leads its own session, so that Ctrl+C reaches only the starting process; a guard process kills it if the
starting process is killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from conch.machine import guard

#: Timeout for the exit of a server with models (s).
_STOP_SECONDS: Final = 15.0
#: Number of log lines quoted in a message.
_QUOTED: Final = 3
#: An error in the log, after its level, time and source location.
_COMPLAINT: Final = re.compile(r"^[EF]\d[^\]]*\] (.*)$", re.MULTILINE)


class GuardedServer:
    """A process of ``conch serve``, running from creation until ``close``; its output is appended to ``log``.

    It runs in ``folder`` (default: the current directory); ``environment`` replaces the whole environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self._begun = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment, cwd=folder,
            )  # fmt: skip
        self._guard = start_guard()
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"+{self._process.pid}\n".encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_message(self) -> str:
        """The exit status and the last log lines of a server that has ended; empty while it runs."""
        if self.alive:
            return ""
        return f"conch serve has ended with status {self._process.returncode}:\n{self.log_end()}"

    def wait(self) -> None:
        """Wait until the server ends."""
        self._process.wait()

    def log_size(self) -> int:
        """Return the size of the log (bytes)."""
        return self._log.stat().st_size

    def log_text(self, since: int = 0) -> str:
        """Return this server's log from byte ``since`` of the file on."""
        return self._log.read_bytes()[max(since, self._begun) :].decode(errors="replace")

    def complaints(self, since: int = 0) -> str:
        """Return the last errors in the log from byte ``since`` on, without time and source location; empty if none."""
        return "\n".join(_COMPLAINT.findall(self.log_text(since))[-_QUOTED:])

    def log_end(self) -> str:
        """Return the last errors in the log, or its last lines if there are none."""
        return self.complaints() or "\n".join(self.log_text().splitlines()[-_QUOTED:])

    def close(self) -> None:
        """End the server and all processes that it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.write(f"-{self._process.pid}\n".encode())
        self._guard.stdin.close()
        self._guard.wait()


def start_guard() -> subprocess.Popen[bytes]:
    """Start a guard process (``guard.py``), which reads the process groups that it must kill from its standard input.

    It leads its own session, so that neither Ctrl+C nor the end of the terminal reaches it.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__))],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
