"""Implements ``breakpoint()`` in models: a debugger prompt at the server's terminal, or a warning without a terminal.

Runs in workers, in any environment (standard library only).
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from conch.workers.child.channel import Channel

_PASSED_OVER = "breakpoint() was skipped; to stop there, start the server with --debug and the name of this model"


def debug_at_terminal(channel: Channel) -> None:
    """Make ``breakpoint()`` open pdb at standard input; the server holds its log lines while the prompt is open."""

    def stop(*arguments: Any, **keywords: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*arguments, **keywords)
        return _open_pdb(channel, sys._getframe(1))

    sys.breakpointhook = stop


def pass_breakpoints(channel: Channel) -> None:
    """Make ``breakpoint()`` log how to debug and continue, for workers without a terminal."""

    def warn(*arguments: Any, **keywords: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*arguments, **keywords)
        frame = sys._getframe(1)
        channel.send(
            {
                "op": "log",
                "level": "WARNING",
                "file": os.path.basename(frame.f_code.co_filename),
                "line": frame.f_lineno,
                "message": _PASSED_OVER,
            }
        )

    sys.breakpointhook = warn


def _open_pdb(channel: Channel, frame: FrameType) -> None:
    import pdb

    class TerminalDebugger(pdb.Pdb):
        """Notifies the server when the prompt opens and closes, so that log lines do not interrupt it."""

        def interaction(self, *arguments: Any, **keywords: Any) -> None:
            channel.send({"op": "prompt", "open": True})
            try:
                super().interaction(*arguments, **keywords)
            finally:
                channel.send({"op": "prompt", "open": False})

    # The server handles Ctrl+C.
    TerminalDebugger(nosigint=True).set_trace(frame)
