"""What ``breakpoint()`` does in a model: a prompt at the server's terminal, where the worker has that.

Runs in workers, in any environment (standard library only).
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from conch.workers.child.channel import Channel

_PASSED_OVER = "breakpoint() was passed over; to stop there, start the server with --debug and the name of this model"


def debug_at_terminal(channel: Channel) -> None:
    """Let ``breakpoint()`` open pdb at this process's standard input; the server logs nothing while it is open."""

    def stop(*arguments: Any, **keywords: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*arguments, **keywords)
        return _open_pdb(channel, sys._getframe(1))

    sys.breakpointhook = stop


def pass_breakpoints(channel: Channel) -> None:
    """Let ``breakpoint()`` log how to debug, and go on: there is no terminal."""

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
        """Tells the server when its prompt opens and closes, so that no line of the log comes between."""

        def interaction(self, *arguments: Any, **keywords: Any) -> None:
            channel.send({"op": "prompt", "open": True})
            try:
                super().interaction(*arguments, **keywords)
            finally:
                channel.send({"op": "prompt", "open": False})

    # Ctrl+C is the server's.
    TerminalDebugger(nosigint=True).set_trace(frame)
