"""What a worker says, in the server's log: its messages, the lines that it prints, and what waits for its debugger.

Belongs to a ``WorkerProcess``; on the event loop.
"""

from __future__ import annotations

from typing import Any

from conch import logs


class Speech:
    """The log lines of one worker."""

    def __init__(self) -> None:
        self._lines = 0
        self._prompting = False

    def line(self, text: str, name: str, pid: int) -> None:
        """Log a line that the model, or a program that it started, wrote to standard output or error."""
        self._lines += 1
        logs.emit_from_worker("INFO", "output", self._lines, text, name, pid)

    def message(self, header: dict[str, Any], said: set[str], name: str, pid: int) -> None:
        """Log a message, unless it is for ``once`` and among those that workers of the model have ``said``."""
        text = header["message"]
        if header.get("once"):
            if text in said:
                return
            said.add(text)
        logs.emit_from_worker(header["level"], header["file"], header["line"], text, name, pid)

    def at_prompt(self, opened: bool) -> None:
        """Keep the log's lines while a debugger's prompt is open at the terminal, and write them when it closes."""
        if opened == self._prompting:
            return
        self._prompting = opened
        if opened:
            logs.hold()
        else:
            logs.release()
